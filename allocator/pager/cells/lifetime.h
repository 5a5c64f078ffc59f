// Pins of cells, the ends of their moves, and their own end: with the last storage, pin and version that has them.
#pragma once

#include "cells/cell.h"
#include "cells/types.h"

namespace memmgr::pager {

// True: the bytes are there. False: the pin holds, but somebody has to bring them back.
inline bool pin(Cell* c, uint64_t now) {
  const uint32_t before = c->state.fetch_add(1, std::memory_order_acquire);
  c->last_touch.store(now, std::memory_order_relaxed);
  return !(before & (kAbsent | kBusy));
}
// For whoever knows the cell by a version and not by its storage: false where the storage has died, since the one who
// ends the cell is then on his way.
bool pin_living_locked(Cell* c, uint64_t now);
void last_user_is_gone(Cell* c);
inline void unpin(Cell* c) {
  note_used(c);
  const uint32_t before = c->state.fetch_sub(1, std::memory_order_acq_rel);
  if (C10_UNLIKELY((before & kDead) && (before & kPinMask) == 1 && !(before & kBusy))) last_user_is_gone(c);
}
// Clears kBusy, sets or clears kAbsent, wakes who waits.
void end_move(Cell* c, bool absent);
bool end_move_locked(Cell* c, bool absent);  // true: call last_user_is_gone() once the lock is free
// The bytes of a cell that the caller has busy are here; ends the move, too.
// `filled_on`: in whose order they are written.
bool come_back_locked(Cell* c, at::DataPtr bytes, mm_stream filled_on, Trash* trash);

}  // namespace memmgr::pager
