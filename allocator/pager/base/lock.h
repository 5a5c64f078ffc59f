// The pager's mutexes. Each has a name, a rank and a rule for forks (locks.def). A thread that takes one out of order
// could deadlock with another, so where ranks are checked the process ends there, with both names. Clang compares
// guarded state with held locks (make check-locks). This unit needs no torch.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#ifdef __clang__
#define MM_LOCKS(x) __attribute__((x))
#else
#define MM_LOCKS(x)
#endif
#define GUARDED_BY(lock) MM_LOCKS(guarded_by(lock))
#define OF_GRAPH GUARDED_BY(graph_lock())
#define REQUIRES(lock) MM_LOCKS(requires_capability(lock))
#define NOT_ANALYZED MM_LOCKS(no_thread_safety_analysis)  // with the reason beside it

namespace memmgr::pager {

enum class LockId : uint8_t {
#define LOCK(name, rank, fork, guards) k##name,
#include "base/locks.def"
#undef LOCK
  kCount
};

enum class AtFork : uint8_t { kTaken, kRenewed };

extern std::atomic<bool> checks_lock_ranks;
// The thread is about to wait for this lock. Ends the process if it holds one that comes later.
void check_rank(LockId id);
void note_taken(LockId id);
void note_given(LockId id);

class MM_LOCKS(capability("mutex")) Lock : private std::mutex {
 public:
  explicit Lock(LockId id) : id_(id) {}
  Lock(const Lock&) = delete;
  void lock() MM_LOCKS(acquire_capability()) {
    const bool checks = checks_lock_ranks.load(std::memory_order_relaxed);
    if (__builtin_expect(checks, false)) check_rank(id_);
    std::mutex::lock();
    if (__builtin_expect(checks, false)) note_taken(id_);
  }
  // Waits for nothing, so any order is allowed.
  bool try_lock() MM_LOCKS(try_acquire_capability(true)) {
    const bool took = std::mutex::try_lock();
    if (__builtin_expect(took && checks_lock_ranks.load(std::memory_order_relaxed), false)) note_taken(id_);
    return took;
  }
  void unlock() MM_LOCKS(release_capability()) {
    if (__builtin_expect(checks_lock_ranks.load(std::memory_order_relaxed), false)) note_given(id_);
    std::mutex::unlock();
  }
  // Without a check of ranks: a fork holds all leaves at once.
  void take_for_fork() { std::mutex::lock(); }
  void give_after_fork() { std::mutex::unlock(); }
  // In a forked child.
  void renew() { new (static_cast<std::mutex*>(this)) std::mutex; }
  LockId id() const { return id_; }

 private:
  const LockId id_;
};

// There is one of each id. All are made when the library is loaded, and live as long as the process.
Lock& lock_of(LockId id);
Lock& graph_lock();  // guards the graph: cells, versions, recipes

// Holds a lock while it lives. A Condition waits on it.
class MM_LOCKS(scoped_lockable) Hold {
 public:
  explicit Hold(Lock& lock) MM_LOCKS(acquire_capability(lock)) : lock_(lock), owns_(true) { lock_.lock(); }
  ~Hold() MM_LOCKS(release_capability()) {
    if (owns_) lock_.unlock();
  }
  Hold(const Hold&) = delete;
  void lock() MM_LOCKS(acquire_capability()) {
    lock_.lock();
    owns_ = true;
  }
  void unlock() MM_LOCKS(release_capability()) {
    owns_ = false;
    lock_.unlock();
  }

 private:
  Lock& lock_;
  bool owns_;
};

// Gives a lock up while it lives. The thread's Hold lives longer.
class MM_LOCKS(scoped_lockable) Unlocked {
 public:
  explicit Unlocked(Lock& lock) MM_LOCKS(release_capability(lock)) : lock_(lock) { lock_.unlock(); }
  ~Unlocked() MM_LOCKS(release_capability()) { lock_.lock(); }
  Unlocked(const Unlocked&) = delete;

 private:
  Lock& lock_;
};

// A condition variable that a forked child makes new. It lives as long as the process.
struct Condition : std::condition_variable_any {
  Condition();
  void renew() { new (static_cast<std::condition_variable_any*>(this)) std::condition_variable_any; }
};

// ---- forks ----

// Takes all locks that a fork takes, in the order of their ranks.
void take_locks_for_fork();
void give_locks_after_fork();
// Makes the other locks and all conditions new, and calls the functions of `in_forked_child`. In the child, after
// give_locks_after_fork().
void renew_after_fork();
// Registers a function that a forked child calls first. Returns true.
bool in_forked_child(void (*renew)());

}  // namespace memmgr::pager
