// Random numbers of recipes (rule 6): the state before an op drew, and draws from a private generator.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/stack.h>

#include <utility>

#include "base/lock.h"
#include "ops/op_info.h"

namespace memmgr::pager {

class Pool;

// While it owns the lock of draws, only this thread draws from a generator that ops may share: from the record of a
// state until the op has drawn.
class Drawing {
 public:
  Drawing() = default;
  explicit Drawing(bool owns) : owns_(owns) {}
  Drawing(Drawing&& from) noexcept : owns_(std::exchange(from.owns_, false)) {}
  Drawing& operator=(Drawing&& from) noexcept {
    std::swap(owns_, from.owns_);
    return *this;
  }
  ~Drawing() {
    if (owns_) unlock();
  }
  bool owns_lock() const { return owns_; }
  void unlock() NOT_ANALYZED;  // an object that moves owns the lock

 private:
  bool owns_ = false;
};
// Owns nothing if the thread has the lock already.
Drawing begin_drawing() NOT_ANALYZED;

// Returns true if this op can run on a given generator. `pool`: that of the managed device.
bool can_draw_again(const Pool& pool, const OpInfo* info);
// Returns a copy of the generator that the call will use.
at::Generator generator_before(const Pool& pool, const OpInfo* info, const c10::IValue* args);
// Runs the op on the stack with a copy of `state` as its generator. The program's generators do not change. Runs
// `kernel`, unless only another op takes a generator.
void draw_again(const Pool& pool, const OpInfo* info, const c10::KernelFunction& kernel, c10::DispatchKeySet keys,
                const at::Generator& state, torch::jit::Stack* stack);

}  // namespace memmgr::pager
