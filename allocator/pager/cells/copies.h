// Copies of cells that are on their way to the tier below or from it. Under the graph's lock.
#pragma once

#include <atomic>
#include <vector>

#include "cells/cell.h"
#include "cells/types.h"

namespace memmgr::pager {

// Writes and reads.
extern std::atomic<int> copies_under_way;

// The cell is being written to this slot.
void note_write_locked(Cell* c, mm_slot slot);
void forget_write_locked(Cell* c);
// Takes back the write of a cell, if there is one.
void cancel_write_locked(Cell* c, Trash* trash);
std::vector<Cell*>& writes_under_way();

// The bytes of `c` have gone over the link.
void note_moved_locked(Cell* c, bool write);

}  // namespace memmgr::pager
