#include "base/lock.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <mutex>
#include <type_traits>

#include "base/debug.h"

namespace memmgr::pager {

std::atomic<bool> checks_lock_ranks{is_debugging()};

namespace {

constexpr size_t kLocks = static_cast<size_t>(LockId::kCount);
constexpr int kLeaf = 100;

struct Facts {
  const char* name;
  int rank;
  AtFork fork;
};

constexpr Facts kFacts[kLocks] = {
#define LOCK(name, rank, fork, guards) {#name, rank, AtFork::fork},
#include "base/locks.def"
#undef LOCK
};

// std::is_sorted is constexpr from C++20 on, and torch 2.11 is compiled with C++17.
constexpr bool ranks_rise() {
  for (size_t i = 1; i < kLocks; ++i)
    if (kFacts[i].rank < kFacts[i - 1].rank) return false;
  return true;
}
static_assert(ranks_rise());

const Facts& facts_of(LockId id) { return kFacts[static_cast<size_t>(id)]; }

// A function makes them, because objects of other units ask for their locks when they are made.
struct AllLocks {
  Lock locks[kLocks] = {
#define LOCK(name, rank, fork, guards) Lock(LockId::k##name),
#include "base/locks.def"
#undef LOCK
  };
};

AllLocks& all_locks() {
  static auto* all = new AllLocks;
  return *all;
}

// Two threads may fork at once.
std::mutex forking;
static_assert(std::is_trivially_destructible_v<std::mutex>, "a thread may fork while the process ends");

// A fixed array whose free slots are null. It is filled in any thread and read in a forked child.
template <class T>
struct Registered {
  std::atomic<T> all[16] = {};
  void add(T one) {
    for (auto& slot : all) {
      T free = nullptr;
      if (slot.compare_exchange_strong(free, one)) return;
    }
    std::abort();
  }
};
Registered<Condition*> conditions;
Registered<void (*)()> renewed;

struct HeldLocks {
  LockId ids[8];
  size_t count = 0;
};
thread_local HeldLocks tl_held;

}  // namespace

Condition::Condition() { conditions.add(this); }

Lock& lock_of(LockId id) { return all_locks().locks[static_cast<size_t>(id)]; }
Lock& graph_lock() {
  static Lock& lock = lock_of(LockId::kGraph);
  return lock;
}
// Before there is a second thread: a child of fork would wait for ever for the end of a making that it has cut off.
static const Lock& made_at_load = lock_of(LockId::kGraph);

void check_rank(LockId id) {
  for (size_t i = 0; i < tl_held.count; ++i) {
    const Facts &has = facts_of(tl_held.ids[i]), &wants = facts_of(id);
    if (has.rank < wants.rank) continue;
    std::fprintf(stderr, "memmgr: the lock %s (rank %d) is taken under %s (rank %d)\n", wants.name, wants.rank,
                 has.name, has.rank);
    std::abort();
  }
}

void note_taken(LockId id) {
  if (tl_held.count < std::size(tl_held.ids)) tl_held.ids[tl_held.count++] = id;
}

// The checks may have begun while the lock was held.
void note_given(LockId id) {
  LockId* const end = tl_held.ids + tl_held.count;
  LockId* const at = std::find(tl_held.ids, end, id);
  if (at == end) return;
  std::copy(at + 1, end, at);
  tl_held.count--;
}

// The table is in the order of ranks. The leaves are of one rank: a thread that has one takes no other lock, so waiting
// for them is safe.
void take_locks_for_fork() {
  forking.lock();
  for (Lock& lock : all_locks().locks)
    if (facts_of(lock.id()).fork == AtFork::kTaken) lock.take_for_fork();
}

void give_locks_after_fork() {
  for (Lock& lock : all_locks().locks)
    if (facts_of(lock.id()).fork == AtFork::kTaken) lock.give_after_fork();
  forking.unlock();
}

void renew_after_fork() {
  for (Lock& lock : all_locks().locks)
    if (facts_of(lock.id()).fork == AtFork::kRenewed) lock.renew();
  for (const auto& slot : conditions.all)
    if (Condition* condition = slot.load()) condition->renew();
  for (const auto& slot : renewed.all)
    if (void (*renew)() = slot.load()) renew();
  tl_held.count = 0;
}

bool in_forked_child(void (*renew)()) {
  renewed.add(renew);
  return true;
}

}  // namespace memmgr::pager
