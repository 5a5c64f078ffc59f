// Adoption: a storage becomes a cell, and is none any more when a budget ends.
#pragma once

#include "cells/types.h"

namespace memmgr::pager {

// True if this storage may become a cell: its memory is the pool's, the default allocator's of torch, or a private
// mapping, and no other library has it.
bool adoptable(const c10::StorageImpl* s);
// Storages remember who gave them their first bytes, and would ask torch's allocator for more.
void grows_in_pool(c10::StorageImpl* s);
// Makes it one, if it is not; the address stays. Takes the lock. Null where that cannot be.
// A new cell begins with so many pins.
Cell* adopt(c10::StorageImpl* s, uint32_t pins = 0);
Cell* adopt_locked(c10::StorageImpl* s, uint32_t pins, uint64_t touched_ticks, bool known_adoptable = false);
// The storage has its own pointer again and no cell. The cell is resident and nobody else uses it. The GIL is held.
void unadopt(Cell* c);
// The same of a storage over a mapped file, which others may share (guards/mapped_files.h); null: as any other.
extern Cell* (*adopt_mapped)(c10::StorageImpl* s, uint32_t pins);

}  // namespace memmgr::pager
