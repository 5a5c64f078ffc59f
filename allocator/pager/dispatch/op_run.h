// Call: one try of an op, from the pins of what it touches to the cells of what it made.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>
#include <mutex>

#include "base/tensors.h"
#include "cells/cell.h"
#include "cells/types.h"
#include "guards/collective_pins.h"
#include "guards/touched_cells.h"
#include "ops/op_info.h"
#include "ops/rng.h"
#include "plan/timeline.h"
#include "recipes/op_signature.h"
#include "recipes/recipe.h"
#include "remat/determinism_check.h"
#include "remat/replay.h"

namespace memmgr::pager {

void call_below(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack);
// The storages of the outputs on top of the stack, in order; null where there is none.
void collect_outputs(const torch::jit::Stack& stack, size_t n, c10::SmallVector<c10::StorageImpl*, 4>* storages);
// No cell yet, and one that is paged.
bool newly_large(const c10::StorageImpl* s);
// Will an output be large enough to be a cell, though no argument is? What this misses is a root.
bool may_make_large(const OpInfo* info, const c10::IValue* args, size_t n);
// Without gradient an op's inputs are mostly written before anybody needs its outputs again.
bool records(const OpInfo* info);

// The arguments as they were, for another try: only where one may be needed.
struct KeptArguments {
  c10::SmallVector<c10::IValue, 10> arguments;
  bool there = false;
  void keep(const c10::IValue* args, size_t n) {
    if (!there) arguments.append(args, args + n);
    there = true;
  }
};

// Everything that one try of an op does; what it throws may be mended by the caller.
class Call {
 public:
  Call(const c10::OperatorHandle& op, OpInfo* info, c10::DispatchKeySet below, torch::jit::Stack* stack)
      : op_(op), info_(info), below_(below), stack_(stack) {}

  void run(Frame& frame, bool outermost, KeptArguments* kept);

  void give_up() { discard(std::move(recipe_)); }

  bool began_writes = false;
  bool drew = false;
  double seconds = 0;
  OpTimer timer;
  c10::SmallVector<Cell*, 4> made;

 private:
  void note_scratch(uint64_t bytes);
  static bool measures();  // without a limit: what a run needs is looked at, and may not be changed by that
  // Is there room for a trial, which takes so much? Of a run that is measured only below what was there before.
  static bool has_room(uint64_t bytes);
  static bool may_try(const Kind* kind, uint64_t bytes);
  bool may_try_in_place() const;
  Again run_again_in_place(c10::ArrayRef<c10::StorageImpl*> left, c10::ArrayRef<c10::StorageImpl*> all);
  void record(Frame& frame, const c10::IValue* args, size_t n);
  void outputs(Frame& frame);
  bool is_trusted() const { return recipe_->kind->trusted(); }
  void attach_if_trusted(c10::ArrayRef<Version*> versions);
  // An `out=` that was resized leaves what it does not need as it was, and no second run knows that.
  bool wrote_all() const;
  void attach_write(const Frame& frame);
  // What is queued has hardly begun: of those the trial says how long they take.
  void note_run();
  // Rule 8: twice at its first use, and compared.
  void try_kind(c10::ArrayRef<c10::StorageImpl*> left, c10::ArrayRef<c10::StorageImpl*> all);
  void keep_until_done(Frame& frame, size_t returns);

  const c10::OperatorHandle& op_;
  OpInfo* info_;
  c10::DispatchKeySet below_;
  torch::jit::Stack* stack_;
  std::unique_ptr<Recipe> recipe_;
  Drawing drawing_;  // from noting the generator's state until the op has drawn
  StoragePtr before_;
  uint64_t ended_ = 0;             // ticks
  KeptArguments* kept_ = nullptr;  // null: the op is inside of another, which is tried again as a whole
};

}  // namespace memmgr::pager
