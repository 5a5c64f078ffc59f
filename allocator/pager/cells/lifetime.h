// Pins of cells, the ends of their moves, and the ends of cells: with the last storage, pin and version that has them.
#pragma once

#include "cells/cell.h"
#include "cells/types.h"

namespace memmgr::pager {

// Pins the cell. True: it is resident. False: it is pinned, and the caller has to restore it.
inline bool pin(Cell* c, uint64_t now) {
  const uint32_t before = c->state.fetch_add(1, std::memory_order_acquire);
  c->last_touch.store(now, std::memory_order_relaxed);
  return !(before & (kAbsent | kBusy));
}
// Pins a cell that the caller has from a version and not from a storage. False: the storage has ended, there is no pin,
// and another thread is ending the cell.
bool pin_living_locked(Cell* c, uint64_t now) REQUIRES(graph_lock());
void last_user_is_gone(Cell* c);
inline void unpin(Cell* c) {
  note_used(c);
  const uint32_t before = c->state.fetch_sub(1, std::memory_order_acq_rel);
  if (C10_UNLIKELY((before & kDead) && (before & kPinMask) == 1 && !(before & kBusy))) last_user_is_gone(c);
}
// Returns true if the address that was handed out is in use for as long as the storage lives (rule 9). Addresses of
// NumPy and DLPack are recorded with their arrays (memmgr/readers/exported.py).
inline bool outlives_budget(Escape why) {
  return why == Escape::kPointer || why == Escape::kForeignWrite || why == Escape::kCaptured;
}
// A resident cell keeps its address from now on, because others have it.
void escape_locked(Cell* c, Escape why) REQUIRES(graph_lock());
// Ends a move: clears kBusy, sets or clears kAbsent, and wakes waiting threads.
void end_move(Cell* c, bool absent);
bool end_move_locked(Cell* c, bool absent)
    REQUIRES(graph_lock());  // true: call last_user_is_gone() once the lock is free
// Makes a cell resident with these bytes, and ends the move. The caller has the cell busy. `filled_on`: the stream that
// writes the bytes.
bool become_resident_locked(Cell* c, at::DataPtr bytes, mm_stream filled_on, Trash* trash) REQUIRES(graph_lock());

}  // namespace memmgr::pager
