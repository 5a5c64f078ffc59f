// The order in which cells are touched next, where no plan foretells it: in the first passes, with lengths that change,
// after a pass has left its plan. The order is taken from
//   - the last whole turn of a loop, or the last pass of a training: the cells that live on (weights, states), in the
//     order in which they were touched;
//   - in a backward: the cells that its forward touched, the last one first.
// Absent cells are restored before they are touched. They get free room, or that of cells that are touched latest and
// have a copy in the tier. Malloc evicts these first (Belady 1966).
//
// Guarded by the graph's lock.
#pragma once

#include "cells/types.h"
#include "plan/timeline.h"

namespace memmgr::pager {

// Takes the order from a turn or a pass that ends. cells: by ordinal; null: the cell has ended.
void learn_order_locked(const Timeline& turn, const std::vector<Cell*>& cells) REQUIRES(graph_lock());
// Takes the order from the forward when a backward begins. forward: the timeline since the last backward ended; cells:
// by its ordinals.
void learn_backward_locked(const Timeline& forward, const std::vector<Cell*>& cells) REQUIRES(graph_lock());
void forget_order_locked() REQUIRES(graph_lock());
// Uses the order while the program goes through a turn, or may do so. False: nothing is foretold.
void use_order_locked(bool on) REQUIRES(graph_lock());
// An op touches a cell that has a place (Cell::in_turn).
void touch_in_order_locked(Cell* c) REQUIRES(graph_lock());

// Starts to read absent cells that are touched next. Nothing is pinned.
void read_in_order(const Session& session);

}  // namespace memmgr::pager
