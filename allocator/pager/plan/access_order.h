// The order in which cells are touched next, where no plan foretells it: the first passes, lengths that change, a pass
// that has left its plan. It is known from
//   - the last whole turn of a loop, or the last pass of a training: the cells that live on (weights, states), as it
//     touched them;
//   - in a backward: the cells that its forward touched, the last one first.
// Cells that are away come back before they are touched, in free room or in that of cells that are touched latest and
// have a copy below; malloc lets these go first (Belady 1966).
//
// Guarded by the graph's lock.
#pragma once

#include "cells/types.h"
#include "plan/timeline.h"

namespace memmgr::pager {

// A turn or a pass that ends; its cells by ordinal, null: it has died.
void learn_order_locked(const Timeline& turn, const std::vector<Cell*>& cells);
// A backward begins. forward: the timeline since the last backward ended; cells: by its ordinals.
void learn_backward_locked(const Timeline& forward, const std::vector<Cell*>& cells);
void forget_order_locked();
// The program goes through a turn, or may do so; false: nothing is foretold.
void use_order_locked(bool on);
// An op touches a cell that has a place (Cell::in_turn).
void touch_in_order_locked(Cell* c);

// Starts to read absent cells that are touched next. Nothing is pinned.
void read_in_order();

}  // namespace memmgr::pager
