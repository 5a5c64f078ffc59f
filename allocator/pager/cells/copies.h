// Copies of cells to and from the tier that have begun and not ended. Under the graph's lock.
#pragma once

#include <atomic>
#include <vector>

#include "cells/cell.h"
#include "cells/types.h"

namespace memmgr::pager {

// The number of writes and reads.
extern std::atomic<int> copies_under_way;

// The cell is being written to this slot.
void note_write_locked(Cell* c, mm_slot slot) REQUIRES(graph_lock());
void forget_write_locked(Cell* c) REQUIRES(graph_lock());
// Cancels the write of a cell, if there is one.
void cancel_write_locked(Cell* c, Trash* trash) REQUIRES(graph_lock());
std::vector<Cell*>& writes_under_way() REQUIRES(graph_lock());

// Counts the bytes of `c` as moved over the link.
void note_moved_locked(Cell* c, bool write) REQUIRES(graph_lock());

}  // namespace memmgr::pager
