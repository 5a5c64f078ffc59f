// Restoring: the thread that touches a cell reads, unpacks or rematerializes its bytes.
#pragma once

#include "cells/types.h"

namespace memmgr::pager {

// Restores the cell: its bytes are in memory on return. The caller has a pin on the cell and holds its storage. No lock
// is held.
void restore_cell(Cell* c);
// Does the same for a cell that no op needs at this moment: it may be evicted again at once. The caller holds its
// storage.
void fetch(Cell* c);
// Returns the cell's bytes in memory of their own: unpacks its bits, or reads its copy in the tier. If that fails, its
// recipe runs, and `absence` says so. The caller has the cell busy.
at::DataPtr copy_back(Cell* c, Absence* absence);
// Waits until no thread moves the cell. The caller has a pin. True: the cell was absent, and is busy for the caller
// now. False: the cell is resident.
bool begin_restore(Cell* c);

// Makes the bytes of an evicted cell by its recipe (remat/rematerialize.h). The caller has the cell busy. Set before
// the first budget.
extern at::DataPtr (*rematerializer)(Cell* c);

}  // namespace memmgr::pager
