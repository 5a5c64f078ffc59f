// Recording: the recipe of one op or launch, from its description until it is attached to the versions that it made.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "base/tensors.h"
#include "cells/types.h"
#include "recipes/op_signature.h"
#include "recipes/recipe.h"

namespace memmgr::pager {

// A run without a limit: it measures the need of a program, and must not change it.
bool is_measuring_run();
// Returns true if there is room for a determinism check that takes so much. A measuring run stays below its high-water
// mark.
bool has_room_for_check(uint64_t bytes);

class Recording {
 public:
  Recording() = default;
  Recording(const Recording&) = delete;
  ~Recording() { give_up(); }

  // The cells of the recipe's inputs are pinned, and the op has not run.
  void begin(std::unique_ptr<Recipe> recipe) {
    give_up();
    recipe_ = std::move(recipe);
  }
  void give_up() {
    if (recipe_) discard(std::move(recipe_));
    before_.clear();
  }
  Recipe* recipe() const { return recipe_.get(); }
  std::unique_ptr<Recipe> take() { return std::move(recipe_); }
  bool is_new() const { return recipe_->kind->trust.load(std::memory_order_relaxed) == Trust::kNew; }

  // At the first use of a signature that writes in place, copies the bytes before the write for the second run. Without
  // room the signature is not checked this time.
  void copy_written();
  // Records the seconds of the run. A queued op has hardly begun: its time comes from the determinism check.
  void note_run(double seconds);
  bool may_check(uint64_t bytes) const;
  // Rule 8: runs the recipe a second time at the first use of its signature, and compares the results. `made`: their
  // storages; null: not compared. `bytes`: the least that the second run takes.
  void check(c10::ArrayRef<c10::StorageImpl*> made, uint64_t bytes);
  // Notes the end of a check, and if the results take little space as bits.
  void end_check(bool same, c10::ArrayRef<c10::StorageImpl*> made);
  // Attaches the recipe, unless its signature has not been checked, or has failed.
  void attach_if_trusted(c10::ArrayRef<Version*> versions);
  void attach_if_trusted(const Cell& written) NOT_ANALYZED {  // the version is read under the lock
    attach_if_trusted(c10::ArrayRef<Version*>(&written.version, 1));
  }

 private:
  // Returns true if the bytes before each write were copied, or the recipe writes to none.
  bool has_copies() const;

  std::unique_ptr<Recipe> recipe_;
  std::vector<StoragePtr> before_;
};

// Returns true if a kernel written in Python was interrupted (Ctrl-C), which is no result of a check.
bool interrupts(const std::exception& e);

}  // namespace memmgr::pager
