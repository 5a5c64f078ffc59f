// Storages whose bytes lie in a private mapping of a file: safetensors, from_pretrained and torch.load(mmap=True) make
// them. The file is a clean copy of the bytes until the first write.
//
// Words:
//   mapping  one mmap of a file
//   range    the part of a mapping that one storage has; several storages may have the same bytes
//
// The cell of such a storage is made in the mapping, or absent if no page of it has been read. When it is evicted, its
// pages are given back, and the range stays mapped for as long as the cell lives. It is restored into memory of the
// pool: from the file, which the tier reads as a slot that is lent to it, or from the tier's own file once it was
// written. If another storage has some of the same bytes, the cell moves back to the mapping before that storage is
// used, and both stay there (Escape::kSlice). When a budget ends the bytes move back to the mapping.
//
// Known limitation: a storage over a whole file has no `filename` while it is a cell.
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
