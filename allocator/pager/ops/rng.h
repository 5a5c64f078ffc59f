// Random numbers of recipes (rule 6): the state before an op drew, and draws from a private generator.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/stack.h>

#include <mutex>

#include "ops/op_info.h"

namespace memmgr::pager {

// Held from the record of a state until the op has drawn, so that no other thread draws in between.
std::mutex& drawing_lock();
// While it owns the lock, only this thread draws from a generator that ops may share.
class Drawing {
 public:
  Drawing() = default;
  explicit Drawing(std::unique_lock<std::mutex> lock);
  Drawing(Drawing&&) = default;
  Drawing& operator=(Drawing&&) = default;
  ~Drawing() {
    if (owns_lock()) unlock();
  }
  bool owns_lock() const { return lock_.owns_lock(); }
  void unlock();

 private:
  std::unique_lock<std::mutex> lock_;
};
// Owns nothing if the thread has the lock already.
Drawing begin_drawing();

// Returns true if this op can run on a given generator.
bool can_draw_again(const OpInfo* info);
// Returns a copy of the generator that the call will use.
at::Generator generator_before(const OpInfo* info, const c10::IValue* args);
// Runs the op on the stack with a copy of `state` as its generator. The program's generators do not change. Runs
// `kernel`, unless only another op takes a generator.
void draw_again(const OpInfo* info, const c10::KernelFunction& kernel, c10::DispatchKeySet keys,
                const at::Generator& state, torch::jit::Stack* stack);

}  // namespace memmgr::pager
