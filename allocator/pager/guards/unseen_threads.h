// Whose ops are seen (rule 12), and where in an op a thread is.
#pragma once

#include <Python.h>

#include <atomic>

#include "cells/cell.h"

namespace memmgr::pager {

// Ops that are under way in this thread: an op inside another has been admitted with it.
extern thread_local int tl_depth;
// Compiled regions that this thread is in: what they were given is pinned, what they make is theirs until they return.
extern thread_local int tl_regions;
// An optimizer makes its states: what is filled with one value has no bytes until somebody touches it.
extern thread_local bool tl_making_states;
// Calls of raw readers that this thread is in: they have said what they write.
extern thread_local int tl_readers;

class Depth {
 public:
  Depth() : depth_(tl_depth) { ++depth_; }
  ~Depth() { --depth_; }
  bool outermost() const { return depth_ == 1; }
  Depth(const Depth&) = delete;
  Depth& operator=(const Depth&) = delete;

 private:
  int& depth_;  // where this thread's is costs more to ask than to remember
};

// Whoever is in the kernel with a budget open may be about to pin a cell: a budget that ends waits until nobody is. Two
// stores an op; the one who waits pays for the order of memory (membarrier).
struct KernelSlot {
  unsigned long system_thread = 0;
  std::atomic<uint32_t> inside{0};
  std::atomic<uint64_t> ops{0};
};
extern thread_local KernelSlot* tl_kernel_slot;
extern bool fence_in_kernel;  // where the system has no membarrier
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
// Until every other thread has left the kernel, at most so long. False: somebody has not.
bool wait_until_kernel_is_left(double seconds);

// The ops of this thread are seen from here on, and of threads that get torch's thread state from it.
void see_this_thread(bool on);
bool thread_is_seen();

// Who hears of this process's ops by torch's callbacks (at::RecordFunction) beside the net below.
enum Listener : uint32_t { kOthers = 1, kForeignCalls = 2, kProfiler = 4 };
extern std::atomic<uint32_t> listeners;
// While nobody listens, the callbacks of the thread that has opened the budget rest: each costs every call of the
// dispatcher 0.1 us, `mm` makes several, and the net has nothing to find in a thread that is seen.
void listen(Listener who, bool on);
void let_callbacks_rest(bool on);
void follow_listeners();

// Python that is called in the middle of an op runs as it is: in a thread in which Dynamo compiles frames, it would
// compile these. With the GIL.
class NotCompiled {
 public:
  NotCompiled();
  ~NotCompiled();
  NotCompiled(const NotCompiled&) = delete;
  NotCompiled& operator=(const NotCompiled&) = delete;

 private:
  PyObject* before_;
};

// A thread on which a backend runs its works: what it makes there is its own (rule 5).
bool is_backends_thread();

// The net for threads that are not seen: registered with a budget.
void catch_unseen_threads(bool on);

}  // namespace memmgr::pager
