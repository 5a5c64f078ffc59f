#include "base/kernel_slots.h"

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/lock.h"
#include "base/no_destructor.h"

namespace memmgr::pager {

thread_local KernelSlot* tl_kernel_slot = nullptr;
bool fence_in_kernel = false;

namespace {

struct KernelSlots {
  Lock& lock = lock_of(LockId::kSlots);
  std::vector<KernelSlot*> all GUARDED_BY(lock);
  uint64_t ops_of_ended GUARDED_BY(lock) = 0;
};

NoDestructor<KernelSlots> kernel_slots;

struct OwnSlot {
  KernelSlot slot;
  OwnSlot() {
    slot.system_thread = static_cast<unsigned long>(syscall(SYS_gettid));
    const Hold lock(kernel_slots->lock);
    kernel_slots->all.push_back(&slot);
  }
  ~OwnSlot() {
    const Hold lock(kernel_slots->lock);
    auto& all = kernel_slots->all;
    kernel_slots->ops_of_ended += slot.ops.load();
    all.erase(std::remove(all.begin(), all.end(), &slot), all.end());
    tl_kernel_slot = nullptr;
  }
};

}  // namespace

KernelSlot* new_kernel_slot() {
  static thread_local OwnSlot own;
  // For ops of a thread's end, after its slot has ended: no thread waits for these.
  static thread_local KernelSlot late;
  static thread_local bool ended = false;
  struct Mark {
    ~Mark() { ended = true; }
  };
  static thread_local Mark mark;
  (void)mark;
  return tl_kernel_slot = ended ? &late : &own.slot;
}

uint64_t ops_counted() {
  const Hold lock(kernel_slots->lock);
  uint64_t ops = kernel_slots->ops_of_ended;
  for (const KernelSlot* s : kernel_slots->all) ops += s->ops.load(std::memory_order_relaxed);
  return ops;
}

uint64_t ops_counted_of(unsigned long system_thread) {
  const Hold lock(kernel_slots->lock);
  for (const KernelSlot* s : kernel_slots->all)
    if (s->system_thread == system_thread) return s->ops.load(std::memory_order_relaxed);
  return 0;
}

void prepare_for_waiting() {
  static const bool registered = syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0;
  if (!registered) fence_in_kernel = true;
}

bool wait_until_kernel_is_left(double seconds) {
  if (!fence_in_kernel) syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0);
  const uint64_t until = now_ns() + static_cast<uint64_t>(seconds * 1e9);
  for (;;) {
    bool inside = false;
    {
      const Hold lock(kernel_slots->lock);
      for (const KernelSlot* s : kernel_slots->all)
        inside |= s != tl_kernel_slot && s->inside.load(std::memory_order_acquire) > 0;
    }
    if (!inside) return true;
    if (now_ns() > until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace memmgr::pager
