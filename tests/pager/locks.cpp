// A program around the pager's locks, without torch: `locks <case>`.
#include "base/lock.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

using namespace memmgr::pager;

static Lock& graph() { return lock_of(LockId::kGraph); }
static Lock& kinds() { return lock_of(LockId::kKinds); }
static Lock& events() { return lock_of(LockId::kEvents); }
static Lock& drawing() { return lock_of(LockId::kDrawing); }

static void in_order() {
  const Hold a(drawing());
  const Hold b(graph());
  const Hold c(events());
}

// Leaves first, then a lock that comes before them.
static void out_of_order() {
  const Hold a(kinds());
  const Hold b(graph());
}

static void two_leaves() {
  const Hold a(kinds());
  const Hold b(events());
}

static void given_back() {
  {
    const Hold a(kinds());
  }
  Hold b(graph());
  b.unlock();
  b.lock();
  const Hold c(kinds());
}

static int renewals = 0;

// A child finds all locks free while other threads take them, and waits for no condition of its parent.
static void forks() {
  static Condition changed;
  in_forked_child([] { ++renewals; });
  std::atomic<bool> stop{false};
  const auto work = [&] {
    while (!stop) {
      in_order();
      const Hold a(kinds());
      changed.notify_all();
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) threads.emplace_back(work);
  int failed = 0;
  for (int i = 0; i < 50; ++i) {
    take_locks_for_fork();
    const pid_t child = fork();
    give_locks_after_fork();
    if (child == 0) {
      alarm(20);
      renew_after_fork();
      in_order();
      const Hold a(kinds());
      changed.notify_all();
      _exit(renewals == 1 ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    failed += status != 0;
  }
  stop = true;
  for (std::thread& t : threads) t.join();
  if (failed) std::printf("%d children failed\n", failed);
  std::_Exit(failed ? 1 : 0);
}

int main(int, char** argv) {
  checks_lock_ranks = true;
  const std::string which = argv[1];
  if (which == "in_order") in_order();
  if (which == "out_of_order") out_of_order();
  if (which == "two_leaves") two_leaves();
  if (which == "given_back") given_back();
  if (which == "forks") forks();
}
