// Random numbers of recipes (rule 6): the state before an op drew, and drawing again from a generator of our own.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/stack.h>

#include <mutex>

#include "ops/op_info.h"

namespace memmgr::pager {

// Held from noting a state until the op has drawn: what lies between is nobody else's.
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
// Owns nothing where the thread has the lock already.
Drawing begin_drawing();

// Is there a way to run this op on a generator that is given?
bool can_draw_again(const OpInfo* info);
// A copy of the generator that the call will use.
at::Generator generator_before(const OpInfo* info, const c10::IValue* args);
// Runs the op on the stack with a copy of `state` as its generator; the program's generators are not touched. By
// `kernel`, unless it takes another op to give it one.
void draw_again(const OpInfo* info, const c10::KernelFunction& kernel, c10::DispatchKeySet keys,
                const at::Generator& state, torch::jit::Stack* stack);

}  // namespace memmgr::pager
