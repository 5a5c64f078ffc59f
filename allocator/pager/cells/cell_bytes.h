// How the bytes of a cell go away and end.
#pragma once

#include "cells/cell.h"
#include "cells/types.h"

namespace memmgr::pager {

// For a cell whose absence is set: the storage has no bytes any more. Returns the owner of their memory;
// it is empty if they lie in a mapping, whose pages the caller drops. The move goes on. `s` is null for an orphan.
at::DataPtr go_away_locked(Cell* c, c10::StorageImpl* s);
// The bytes are no cell's any more, wherever they are. The caller empties `trash` outside of the lock.
void forget_bytes_locked(Cell* c, Trash* trash);

}  // namespace memmgr::pager
