// How the bytes of a cell become absent, and how they end.
#pragma once

#include "cells/cell.h"
#include "cells/types.h"

namespace memmgr::pager {

// Takes the bytes of a cell whose absence is set from its storage. Returns the owner of their memory; empty: they lie
// in a mapping, whose pages the caller drops. The move goes on. `s` is null for an orphan.
at::DataPtr become_absent_locked(Cell* c, c10::StorageImpl* s) REQUIRES(graph_lock());
// Ends the cell's claim on its bytes, wherever they are. The caller empties `trash` outside of the lock.
void forget_bytes_locked(Cell* c, Trash* trash) REQUIRES(graph_lock());

}  // namespace memmgr::pager
