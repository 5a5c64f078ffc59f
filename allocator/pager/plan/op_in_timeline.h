// An op in the timeline: the op is noted, the plan is followed, reads begin, and periods end.
#pragma once

#include "base/session.h"
#include "cells/types.h"
#include "guards/touched_cells.h"
#include "ops/op_info.h"
#include "plan/timeline.h"

namespace memmgr::pager {

// The place of one op in the timeline. The kernel makes it for outermost ops that touch cells.
class Moment {
 public:
  explicit Moment(Session& session) : session_(session) {}

  // Called before the op's cells are pinned. Begins the plan's actions that are due before the op.
  void begins(OpInfo* info, const Frame& frame, bool follow = true);
  // Called after the op ran. The caller still holds the op's outputs.
  void ended(OpInfo* info, Cell* const* made, size_t n, double seconds, uint64_t scratch, OpTimer* timer = nullptr);
  // Called when the op's pins have ended. Begins the plan's actions that are due after the op.
  void left();

 private:
  Session& session_;
  int64_t position_ = -1;
  bool ended_ = false;
};

// Called where an outermost backward begins.
void turn_period(Session& session);
// Begins the next period. Returns the timeline of the one that ends; empty: it was not noted.
Timeline next_period(const Session& session, bool noted);

// Turns of loops are looked for until the budget ends.
void seek_loops(const Session& session, bool on);

}  // namespace memmgr::pager
