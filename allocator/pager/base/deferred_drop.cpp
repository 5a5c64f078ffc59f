#include "base/deferred_drop.h"

#include <pthread.h>
#include <torch/headeronly/version.h>

#include <chrono>
#include <thread>
#include <vector>

#include "base/forked_child.h"
#include "base/lock.h"
#include "base/no_destructor.h"
#include "base/private_member.h"

namespace memmgr::pager {

MEMMGR_PRIVATE_MEMBER(CountOfTarget, c10::intrusive_ptr_target, combined_refcount_)

static std::atomic<uint64_t>& counts_of(c10::StorageImpl* s) {
  return static_cast<c10::intrusive_ptr_target*>(s)->*private_member(CountOfTarget());
}

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
static bool only_python_has(uint64_t counts) {
  return c10::detail::refcount(counts) == 1 && c10::detail::has_pyobject(counts);
}

bool only_python_has(const WeakStorage& weak) {
  const auto* s = static_cast<const c10::intrusive_ptr_target*>(weak._unsafe_get_target());
  return s && only_python_has((s->*private_member(CountOfTarget())).load(std::memory_order_relaxed));
}

StoragePtr hold_storage(const WeakStorage& weak) {
  auto* s = static_cast<c10::StorageImpl*>(weak._unsafe_get_target());
  if (!s) return {};
  auto& counts = counts_of(s);
  uint64_t seen = counts.load(std::memory_order_relaxed);
  do {
    if (c10::detail::refcount(seen) == 0 || only_python_has(seen)) return {};
  } while (!counts.compare_exchange_weak(seen, seen + c10::detail::kReferenceCountOne, std::memory_order_acquire,
                                         std::memory_order_relaxed));
  return StoragePtr::reclaim(s);
}

void drop(StoragePtr storage) {
  if (c10::detail::has_pyobject(counts_of(storage.get()).load(std::memory_order_acquire)))
    drop_later(std::move(storage));
}
#else
bool only_python_has(const WeakStorage&) { return false; }
StoragePtr hold_storage(const WeakStorage& weak) { return weak.lock(); }
void drop(StoragePtr storage) { drop_later(std::move(storage)); }
#endif

namespace {

// Drops references where that may take the GIL, in a thread that has none of the pager's locks.
struct Dropper {
  Lock& lock = lock_of(LockId::kDropper);
  Condition changed;
  std::vector<StoragePtr> waiting GUARDED_BY(lock);
  bool busy GUARDED_BY(lock) = false;
  bool stopping GUARDED_BY(lock) = false;
  std::thread thread GUARDED_BY(lock);
  bool is_idle() const REQUIRES(lock) { return waiting.empty() && !busy; }
  void start() REQUIRES(lock);
};

NoDestructor<Dropper> dropper;

void drop_for_ever() {
  pthread_setname_np(pthread_self(), "memmgr drops");
  Dropper& d = *dropper;
  Hold lock(d.lock);
  for (;;) {
    while (!d.stopping && d.waiting.empty()) d.changed.wait(lock);
    if (d.waiting.empty()) return;
    std::vector<StoragePtr> now;
    now.swap(d.waiting);
    d.busy = true;
    lock.unlock();
    now.clear();
    lock.lock();
    d.busy = false;
    d.changed.notify_all();
  }
}

// While the thread is being stopped, references wait for the next one.
void Dropper::start() {
  if (!thread.joinable() && !stopping && !waiting.empty()) thread = std::thread(drop_for_ever);
}

// Drops a reference if more are left, without a call of Python. False: the drop may run code.
bool dropped_for_others(StoragePtr* storage) {
  auto& counts = counts_of(storage->get());
  uint64_t seen = counts.load(std::memory_order_relaxed);
  do {
    if (c10::detail::refcount(seen) <= (c10::detail::has_pyobject(seen) ? 2u : 1u)) return false;
  } while (!counts.compare_exchange_weak(seen, seen - c10::detail::kReferenceCountOne, std::memory_order_acq_rel,
                                         std::memory_order_relaxed));
  storage->release();
  return true;
}

}  // namespace

void drop_later(StoragePtr storage) {
  // Otherwise a step of a tree LSTM wakes the thread 125 to 350 times, on a core that its ops need.
  if (dropped_for_others(&storage)) return;
  if (C10_UNLIKELY(forked_child))
    return;  // dropped here: a child has no such thread, and is in no malloc and under no lock
  Dropper& d = *dropper;
  const Hold lock(d.lock);
  d.waiting.push_back(std::move(storage));
  d.start();
  d.changed.notify_all();
}

void drop_what_waits() {
  Dropper& d = *dropper;
  Hold lock(d.lock);
  while (!d.is_idle()) d.changed.wait(lock);
}

bool wait_for_dropper(double seconds) {
  Dropper& d = *dropper;
  Hold lock(d.lock);
  if (d.is_idle()) return false;
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!d.is_idle() && d.changed.wait_until(lock, until) == std::cv_status::no_timeout) {
  }
  return true;
}

void stop_dropper() {
  Dropper& d = *dropper;
  std::thread ends;
  {
    const Hold lock(d.lock);
    d.stopping = true;
    ends.swap(d.thread);
    d.changed.notify_all();
  }
  if (ends.joinable()) ends.join();
  const Hold lock(d.lock);
  d.stopping = false;
  d.start();  // other threads may have dropped references meanwhile
}

// The thread is not in the child.
static const bool renews_dropper = in_forked_child([] {
  Dropper& d = *dropper;
  const Hold lock(d.lock);
  new (&d.thread) std::thread;
  d.busy = false;
});

}  // namespace memmgr::pager
