#include "python/fork.h"

#include <ATen/record_function.h>
#include <pthread.h>
#include <sched.h>

#include <vector>

#include "base/at_fork.h"
#include "base/budget.h"
#include "base/deferred_drop.h"
#include "base/events.h"
#include "cells/cell.h"
#include "cells/freeze.h"
#include "cells/types.h"
#include "concurrency/admission.h"
#include "ops/rng.h"
#include "plan/timeline.h"
#include "pools/pool.h"
#include "residency/transfer.h"

namespace memmgr::pager {

namespace {

bool try_all(const std::vector<std::mutex*>& all) {
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i]->try_lock()) continue;
    while (i-- > 0) all[i]->unlock();
    return false;
  }
  return true;
}

// This list is not in the order in which the locks nest, so the fork waits for none of them while it has another.
void before_fork() {
  // A thread's first op copies torch's list of observers under a lock of torch's. Once there is an observer, that copy
  // needs malloc, which a fork blocks in other threads: a child would find torch's lock taken. So the thread that forks
  // makes its copy now, and its child needs none. (A thread that the child starts may still wait for ever at its first
  // op.)
  at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  fork_locks().lock.lock();
  for (;;) {
    try {
      if (transfers_under_way()) finish_transfers();  // the child has no thread that would end them
    } catch (const std::exception&) {
    }
    while (!try_all(fork_locks().all)) sched_yield();
    if (!transfers_under_way()) return;
    for (std::mutex* m : fork_locks().all) m->unlock();
  }
}

void after_fork_in_parent() {
  for (std::mutex* m : fork_locks().all) m->unlock();
  fork_locks().lock.unlock();
}

void after_fork_in_child() {
  after_fork_in_parent();
  new (&residency_changed()) std::condition_variable;
  new (&drawing_lock()) std::mutex;  // held while an op draws; it guards no state of the pager
  forget_admission_in_child();
  forget_dropper_in_child();
  forget_watch_in_child();
  if (!budget.arena) return;
  budget.forked = true;
  budget.pool->forget_in_child();  // also if a budget was just ending: it closes before its pool ends
  if (!budget.open) return;
  stay_in_child();
  timeline_on = false;
  // The threads that had cells busy are not in the child. Bytes and residency change in one step under the lock: each
  // cell is either resident or absent.
  for_each_cell_locked([](Cell* c) { c->state.fetch_and(~kBusy); });
}

}  // namespace

void watch_forks() {
  static const int once = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  (void)once;
}

}  // namespace memmgr::pager
