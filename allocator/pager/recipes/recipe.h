// Recipes: the op and its arguments that make a version's bytes again (rule 5).
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "base/session.h"
#include "base/thread_state.h"
#include "cells/cell.h"
#include "cells/types.h"
#include "ops/op_info.h"
#include "recipes/op_signature.h"

namespace memmgr::pager {

// Returns true where a backward may need the results of this thread's ops: in gradient mode, and in the compiled
// forward of a training.
inline bool makes_recipes() { return c10::GradMode::is_enabled() || tl_compiled_forward; }

// Describes the call on the stack before it runs. The cells of its large tensors are pinned and resident. Null: the op
// cannot be run again. The result has references that the lock guards: end it with discard().
std::unique_ptr<Recipe> describe(Session& session, OpInfo* info, c10::DispatchKeySet keys, const c10::IValue* args,
                                 size_t n);
void discard(std::unique_ptr<Recipe> recipe);

// Parts of a description. Returns the recipe's new entry for a tensor, with its geometry. The hash gets that, too, and
// `facts`.
TensorArg& add_tensor(Recipe* recipe, const c10::TensorImpl* t, size_t argument, uint64_t facts, HashOf<false>* hash);
// Returns true for a number that is kept by value.
bool is_value(const TensorArg& a, const c10::TensorImpl* t);
// Completes a description: numerics, signature, and the versions of `cells` as inputs. Null: it cannot be run again.
std::unique_ptr<Recipe> with_inputs(Session& session, std::unique_ptr<Recipe> r, HashOf<false> hash,
                                    const c10::KernelFunction& kernel, const void* code,
                                    const c10::SmallVectorImpl<Cell*>& cells);

// Makes it the recipe of these versions.
void attach_locked(std::unique_ptr<Recipe> recipe, c10::ArrayRef<Version*> outputs, Trash* trash)
    REQUIRES(graph_lock());
// Called after attaching. Cuts the oldest recipes if all of them take more bytes than they may (rule 5). Takes the
// lock.
void keep_recipes_few(Session& session);

// Drops recipes of resident versions that no other recipe needs: all (at the end), or the older half.
void cut_recipes(Session& session, bool all);

// Returns the seconds to make the version's bytes, with those of absent inputs. Looks at a bounded number of recipes.
double seconds_to_make_locked(const Version* v) REQUIRES(graph_lock());
// Returns true for an ordinary strided tensor with memory of its own.
bool is_plain(const Session& session, const c10::TensorImpl* t);

}  // namespace memmgr::pager
