// Threads that are in the pager's kernel, and the number of ops that each has begun.
#pragma once

#include <c10/macros/Macros.h>

#include <atomic>
#include <cstdint>

namespace memmgr::pager {

// A thread in the kernel with an open budget may be about to pin a cell. A budget that ends waits until no thread is
// there. An op makes two stores; the waiting thread pays for the order of memory (membarrier).
struct KernelSlot {
  unsigned long system_thread = 0;
  std::atomic<uint32_t> inside{0};
  std::atomic<uint64_t> ops{0};
};
extern thread_local KernelSlot* tl_kernel_slot;
extern bool fence_in_kernel;  // true: the system has no membarrier
KernelSlot* new_kernel_slot();
class InKernel {
 public:
  InKernel() : slot_(tl_kernel_slot ? tl_kernel_slot : new_kernel_slot()) {
    slot_->inside.store(slot_->inside.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    if (C10_UNLIKELY(fence_in_kernel)) std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  ~InKernel() { slot_->inside.store(slot_->inside.load(std::memory_order_relaxed) - 1, std::memory_order_release); }
  void count_op() { slot_->ops.store(slot_->ops.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed); }
  InKernel(const InKernel&) = delete;
  InKernel& operator=(const InKernel&) = delete;

 private:
  KernelSlot* slot_;
};
uint64_t ops_counted();  // of all threads, since the process began
uint64_t ops_counted_of(unsigned long system_thread);
void prepare_for_waiting();  // before the first op of a budget
// Waits until every other thread has left the kernel, at most so long. False: a thread is still there.
bool wait_until_kernel_is_left(double seconds);

}  // namespace memmgr::pager
