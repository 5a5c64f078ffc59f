// Restoring: bytes are made again, read back or unpacked by the thread that touches the cell.
#pragma once

#include "cells/types.h"

namespace memmgr::pager {

// The bytes are in memory when this returns. The caller has a pin on the cell and holds its storage. No lock is held.
void bring_back(Cell* c);
// The same for a cell that nobody needs at this moment: it may leave again at once. The caller holds its storage.
void fetch(Cell* c);
// Waits until nobody moves the cell. True: the bytes are away, and the caller, who has a pin, has the cell busy. False:
// they are here.
bool begin_coming_back(Cell* c);

// Makes the bytes of an evicted cell, which the caller has busy, by its recipe (remat/rematerialize.h). Set before the
// first budget.
extern at::DataPtr (*make_again)(Cell* c);

}  // namespace memmgr::pager
