// Moves of cells between the pool and private mappings of files (cells/file_range.h has the words).
#pragma once

#include <c10/core/StorageImpl.h>

#include <memory>

#include "memmgr/core.h"

namespace memmgr::pager {

struct Cell;
struct Mapping;

// Moves cells of other storages that have some bytes of `s` back to the mapping for good. True: there are such cells.
// No lock is held. Throws if a cell cannot be moved: its address was handed out, or an op or a pin that does not end
// uses it.
bool share_mapping(c10::StorageImpl* s);
// Moves the bytes to the storage's first address. False: an op uses them where they are, or the file has changed and
// the pool has the bytes. Throws if a changed file was the only copy. The caller holds the storage.
bool return_to_mapping(Cell* c);
// Called before the file at this path is overwritten. Moves the cells over it into memory of the pool, from which they
// may be offloaded. Throws as share_mapping does.
void forsake_file(const char* path);

}  // namespace memmgr::pager
