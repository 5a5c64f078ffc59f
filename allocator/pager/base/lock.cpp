#include "base/lock.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

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

const Facts& facts_of(LockId id) { return kFacts[static_cast<size_t>(id)]; }

// Locks are made at their first use, in any thread.
std::atomic<Lock*> made[kLocks];

// Two threads may fork at once.
std::mutex& forking() {
  static auto* lock = new std::mutex;
  return *lock;
}

// Those that the fork under way has taken: another thread may make one meanwhile.
std::vector<Lock*>& taken_by_fork() {
  static auto* all = new std::vector<Lock*>;
  return *all;
}

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

Lock::Lock(LockId id) : id_(id) { made[static_cast<size_t>(id)].store(this); }

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

void take_locks_for_fork() {
  forking().lock();
  std::vector<Lock*>& all = taken_by_fork();
  all.clear();
  for (size_t i = 0; i < kLocks; ++i)
    if (Lock* lock = kFacts[i].fork == AtFork::kTaken ? made[i].load() : nullptr) all.push_back(lock);
  std::sort(all.begin(), all.end(),
            [](const Lock* a, const Lock* b) { return facts_of(a->id()).rank < facts_of(b->id()).rank; });
  // The leaves are of one rank. A thread that has one takes no other lock, so waiting for them is safe.
  for (Lock* lock : all) lock->take_for_fork();
}

void give_locks_after_fork() {
  for (Lock* lock : taken_by_fork()) lock->give_after_fork();
  forking().unlock();
}

void renew_after_fork() {
  const auto taken = [](const Lock* lock) {
    const std::vector<Lock*>& all = taken_by_fork();
    return std::find(all.begin(), all.end(), lock) != all.end();
  };
  for (size_t i = 0; i < kLocks; ++i)
    if (Lock* lock = made[i].load(); lock && !taken(lock)) lock->renew();  // also one that was made during the fork
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
