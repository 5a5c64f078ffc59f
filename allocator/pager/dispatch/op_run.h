// Call: one try of an op, from the pins of its arguments to the cells of its outputs.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>
#include <utility>
#include <vector>

#include "base/tensors.h"
#include "cells/cell.h"
#include "cells/types.h"
#include "dispatch/recording.h"
#include "guards/collective_pins.h"
#include "guards/touched_cells.h"
#include "ops/op_info.h"
#include "ops/rng.h"
#include "plan/timeline.h"
#include "remat/determinism_check.h"
#include "remat/replay.h"

namespace memmgr::pager {

void call_below(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack);
// Collects the storages of the outputs on top of the stack, in order. Null: an output has none.
void collect_outputs(const torch::jit::Stack& stack, size_t n, c10::SmallVector<c10::StorageImpl*, 4>* storages);
// The storages that a call was given. Where results get cells below the usual size (pools/small_blocks.h), these
// do not.
class OldStorages {
 public:
  OldStorages() = default;  // of a call whose results have the usual limit
  OldStorages(const OpInfo* info, const c10::IValue* args, size_t n);
  explicit OldStorages(std::vector<const c10::StorageImpl*> all) : known_(true), all_(std::move(all)) {}
  // Returns true if the call has made the storage.
  bool is_new(const c10::StorageImpl* s) const;

 private:
  bool known_ = false;
  std::vector<const c10::StorageImpl*> all_;
};
// Returns true if the storage is no cell, and would be a paged one.
bool newly_large(const c10::StorageImpl* s, const OldStorages& old);
// Returns true if an output may be large enough for a cell although no argument is. An output that this misses is a
// root.
bool may_make_large(const OpInfo* info, const c10::IValue* args, size_t n);
// Returns true if the op is recorded. Without gradient only ops that fill are: the inputs of others are mostly written
// before their outputs are needed again.
bool records(const OpInfo* info);

// The arguments before the op, for another try. Kept only where one may be needed.
struct KeptArguments {
  c10::SmallVector<c10::IValue, 10> arguments;
  bool there = false;
  void keep(const c10::IValue* args, size_t n) {
    if (!there) arguments.append(args, args + n);
    there = true;
  }
};

// All that one try of an op does. After an exception the caller may try again.
class Call {
 public:
  Call(const c10::OperatorHandle& op, OpInfo* info, c10::DispatchKeySet below, torch::jit::Stack* stack,
       const OldStorages& old)
      : op_(op), info_(info), below_(below), stack_(stack), old_(old) {}

  void run(Frame& frame, bool outermost, KeptArguments* kept);

  void give_up() { recording_.give_up(); }

  bool began_writes = false;
  bool drew = false;
  double seconds = 0;
  OpTimer timer;
  c10::SmallVector<Cell*, 4> made;

 private:
  void note_scratch(uint64_t bytes);
  bool may_try_in_place() const;
  Again run_again_in_place(c10::ArrayRef<c10::StorageImpl*> left, c10::ArrayRef<c10::StorageImpl*> all);
  void record(const c10::IValue* args, size_t n);
  void outputs(Frame& frame);
  // Returns true if the op wrote all of its `out=`. A resized one keeps old bytes beyond its size, which a second run
  // would not make.
  bool wrote_all() const;
  void attach_write(const Frame& frame);
  void note_run();
  // Checks a new signature. Without room for two results the second one takes the place of the first.
  void try_kind(c10::ArrayRef<c10::StorageImpl*> left, c10::ArrayRef<c10::StorageImpl*> all);
  void keep_until_done(Frame& frame, size_t returns);

  const c10::OperatorHandle& op_;
  OpInfo* info_;
  c10::DispatchKeySet below_;
  torch::jit::Stack* stack_;
  const OldStorages& old_;
  Recording recording_;
  Drawing drawing_;                // from the record of the generator's state until the op has drawn
  uint64_t ended_ = 0;             // ticks
  KeptArguments* kept_ = nullptr;  // null: the op is inside another one, which is tried again as a whole
};

}  // namespace memmgr::pager
