// Adoption: a storage becomes a cell. The cell ends when a budget ends.
#pragma once

#include "base/session.h"
#include "cells/types.h"

namespace memmgr::pager {

// True if this storage may become a cell: its memory is that of the session's pool, the default allocator's of torch,
// or a private mapping, and no other library has it.
bool adoptable(const Session& session, const c10::StorageImpl* s);
// Sets the allocator of the storage to the pool. It would otherwise take more memory from the allocator of its first
// bytes.
void grows_in_pool(const Session& session, c10::StorageImpl* s);
// Makes a cell of the storage if it has none. Its address does not change. Takes the lock. Null: it cannot become a
// cell. A new cell begins with so many pins.
// `born`: an op has just made the storage. It is adoptable, unknown to others, and of a size that is paged.
Cell* adopt(Session& session, c10::StorageImpl* s, uint32_t pins = 0, Maker maker = {});
Cell* adopt_locked(Session& session, c10::StorageImpl* s, uint32_t pins, uint64_t touched_ticks, bool born = false,
                   Maker maker = {}) REQUIRES(graph_lock());
// Makes a cell of a storage in a block of Pool::earlier(), with its bytes in the pool, in order of the calling thread's
// stream. The caller knows that nobody else has the old address, which is its name. False: there is no room, or it is
// no such block.
bool move_into_pool(Session& session, c10::StorageImpl* s);
// Gives the storage its own pointer back and ends the cell. The cell is resident and no other thread uses it. The GIL
// is held.
void unadopt(Cell* c);
// Adopts a storage over a mapped file, whose bytes other storages may share (guards/mapped_files.h). Null: it is
// adopted like any other.
extern Cell* (*adopt_mapped)(Session& session, c10::StorageImpl* s, uint32_t pins);

}  // namespace memmgr::pager
