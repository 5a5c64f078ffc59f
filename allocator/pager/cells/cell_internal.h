// What cell.cpp and version.cpp share: how a cell enters the registry and how its bytes end.
#pragma once

#include "cells/cell.h"

namespace memmgr::pager {

void register_locked(Cell* c);
void unregister_locked(Cell* c);
// The bytes are not a cell's any more, wherever they are; the caller empties `trash` outside of the lock.
void forget_bytes_locked(Cell* c, Trash* trash);
// Small bytes that live for recipes alone count as theirs (rule 5).
bool room_for_kept(uint64_t nbytes);
void keep(Cell* c);
// Is it needed, or evicted, with its bytes nowhere: does it need what its recipe reads?
bool pulls_locked(const Version* v);

}  // namespace memmgr::pager
