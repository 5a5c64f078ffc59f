// The order in which the last whole turn of a loop touched what lives on from turn to turn (weights, mostly). What
// comes between turns touches it in the same order and has no plan: a prompt, a batch of another length, the turns
// before there is a plan. There what is away comes back before it is touched, in the room of what was touched last, and
// malloc lets the same go, since that is what is touched latest (Belady 1966).
//
// Known limitations: a cell that a turn touches more than once has the place of its first touch. Guarded by the graph's
// lock.
#pragma once

#include "timeline.h"

namespace memmgr::pager {

// A turn that ends; its cells by ordinal, null: it has died.
void learn_order_locked(const Timeline& turn, const std::vector<Cell*>& cells);
void forget_order_locked();
void forget_in_order_locked(const Cell* c);
// The program goes through a turn, or what it does may be one; false: nothing is foretold.
void use_order_locked(bool on);
// An op has touched the cell with this place (Cell::in_turn).
void order_is_at_locked(uint32_t place);

// Until the cell is touched, as the last turn had it; 0: not known, or a plan leads.
uint64_t ticks_until_touch_locked(const Cell* c);
// So much was touched since the victims were put in order that they no longer are.
bool order_has_moved_locked();
void order_was_used_locked();

// Nothing is pinned: what is touched next and away begins to come back.
void read_in_order();

}  // namespace memmgr::pager
