// An op in the timeline: it is noted, the plan is followed, and reads begin; and where periods end.
#pragma once

#include "cells/types.h"
#include "guards/touched_cells.h"
#include "ops/op_info.h"
#include "plan/timeline.h"

namespace memmgr::pager {

// One op's place in the timeline; made by the kernel for ops that touch cells, outermost ones only.
class Moment {
 public:
  // Before the op's cells are pinned: what a plan wants before it is begun.
  void begins(OpInfo* info, const Frame& frame, bool follow = true);
  // After it ran; what it made is still held by its caller.
  void ended(OpInfo* info, Cell* const* made, size_t n, double seconds, uint64_t scratch, const OpTimer& timer = {});
  // Nothing is pinned any more: what a plan lets go after it may.
  void left();

 private:
  int64_t position_ = -1;
  bool ended_ = false;
};

// An outermost backward begins here.
void turn_period();
// Begins the next period, and hands over what was noted of the one that ends; empty where it was not noted.
Timeline next_period(bool noted);

// Turns of loops are wanted, until the budget ends.
void seek_loops(bool on);

}  // namespace memmgr::pager
