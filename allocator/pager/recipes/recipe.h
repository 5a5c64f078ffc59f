// Recipes: the op and its arguments that make a version's bytes again (rule 5).
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/stack.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "cells/cell.h"
#include "ops/op_info.h"
#include "recipes/op_signature.h"

namespace memmgr::pager {

enum class Role : uint8_t {
  kRead,
  kWritten,  // the op writes to it: a private copy
  kFresh,    // the op writes to all of it without reading
  kValue,    // a number: its bytes are in the recipe
  kShape,    // only its geometry is read
};

struct TensorArg {
  TensorArg() {}  // else emplace_back() would fill it with zeros first
  uint16_t argument = 0;
  int32_t element = -1;  // in a list
  Role role = Role::kRead;
  Version* version = nullptr;  // counted; null for kFresh and kValue
  uint64_t storage_bytes = 0;
  c10::SmallVector<int64_t, 5> sizes;
  c10::SmallVector<int64_t, 5> strides;
  int64_t offset = 0;
  caffe2::TypeMeta dtype;
  c10::Device device{c10::DeviceType::CPU};
  c10::DispatchKeySet keys;
  bool wrapped_number = false;
  alignas(16) char value[16] = {};  // as malloc has it: kernels of complex numbers rely on that
};

constexpr uint16_t kLongestChain = 512;

struct Recipe {
  uint32_t refs = 0;  // versions that it makes, and who runs it; guarded by the graph's lock
  OpInfo* info = nullptr;
  Kind* kind = nullptr;
  c10::DispatchKeySet keys;               // below ours, as the op was called
  c10::SmallVector<c10::IValue, 6> args;  // tensors left out
  c10::SmallVector<TensorArg, 2> tensors;
  c10::SmallVector<Version*, 2> outputs;  // not counted; null: nobody wants it
  at::Generator rng;                      // a copy, in the state before the op drew; undefined: it draws nothing
  int numerics = 0;
  double seconds = -1;  // of its run, where its kind stands for many sizes
  uint32_t module = 0;  // that was running, while somebody looks (introspection.h)
  uint16_t depth = 1;
  bool broken = false;  // something that it reads is lost
  // Its kind, or that of something in its chain, was not tried: what it makes meets its checksum when it comes back.
  bool checked = false;
  bool filled = false;  // without gradient, with one value: it will be written, as an optimizer's states are
  uint64_t bytes = 0;   // that it costs by itself, once it counts among recipe_bytes
};

uint64_t recipe_bytes_limit();

// Describes the call on the stack before it runs; the cells of its large tensors are pinned and resident. Null where
// the op cannot be run again. The result has references that the lock guards: end it with discard().
std::unique_ptr<Recipe> describe(OpInfo* info, c10::DispatchKeySet keys, const c10::IValue* args, size_t n);
void discard(std::unique_ptr<Recipe> recipe);
// The recipe makes these versions.
void attach_locked(std::unique_ptr<Recipe> recipe, c10::ArrayRef<Version*> outputs, Trash* trash);
// After attaching: the oldest recipes go where all take more than they may (rule 5). Takes the lock.
void keep_recipes_few();

inline bool recipe_available_locked(const Recipe* r) { return !r->broken; }
void need_inputs_locked(Recipe* r);
void unneed_inputs_locked(Recipe* r, Trash* trash);
void forget_output_locked(Recipe* r, const Version* v);
// Drops the recipes of what is resident and whom nobody needs: all (at the end), or the older half.
void cut_recipes(bool all);

// Above 0 while this thread runs a recipe.
extern thread_local int tl_running_recipes;

// Bytes for one argument of a run.
struct Source {
  void* data = nullptr;
  StoragePtr own;  // set: nobody else wants the bytes, the run may have them
};
// Runs the recipe on these bytes (one source an entry of `tensors`), below autograd, functorch and modes, with its
// numerics and a generator of its own. Returns the storages of its outputs, in the order of Recipe::outputs; null where
// an output has none of its own.
std::vector<StoragePtr> run(const Recipe& r, std::vector<Source> sources);

// Of one run, as far as is known.
inline double seconds_of(const Recipe* r) {
  return std::max(0.0, r->seconds < 0 ? r->kind->seconds.load(std::memory_order_relaxed) : r->seconds);
}
// Seconds to make the version's bytes, with those of what is gone and must be made first; looks at a bounded number.
double seconds_to_make_locked(const Version* v);
// Is this an ordinary strided tensor with memory of its own?
bool is_plain(const c10::TensorImpl* t);

}  // namespace memmgr::pager
