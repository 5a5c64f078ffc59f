// Cells over ranges of mapped files (file_range.h): how they begin and end, and whether the file is still their copy.
#pragma once

#include <string>
#include <vector>

#include "cells/file_range.h"
#include "cells/types.h"

namespace memmgr::pager {

// One mmap of a file. Its cells are guarded by the graph's lock.
struct Mapping {
  uintptr_t begin = 0, end = 0;
  uint64_t offset = 0;  // in the file, of `begin`
  std::string path;
  int fd = -1;  // none: the file cannot be found any more
  std::vector<Cell*> cells;

  ~Mapping();
};

// Are its bytes in a private mapping? Cheap.
bool is_mapped(const c10::StorageImpl* s);

// A slice of a storage that is a cell.
bool is_part_of_cell(const c10::StorageImpl* s);

// False: the cell of another storage has some of these bytes, and has not gone back to the mapping for good.
bool may_begin_range_locked(const c10::StorageImpl* s);
// The cell of a mapped storage, whose bytes are its pointer. Notes the copy that the file is.
void begin_range_locked(Cell* c);
// No page of it has been read: it needs no memory before its first use.
bool begins_away_locked(const Cell* c);
// The cell has no range any more. The caller empties the answer without the lock.
std::unique_ptr<MappedRange> end_range_locked(Cell* c);
// Visits the cells of other storages over bytes of `s`.
void each_over_locked(const c10::StorageImpl* s, c10::function_ref<void(Cell*)> visit);
// All mappings that have, or had, cells.
std::vector<std::shared_ptr<Mapping>> living_mappings_locked();
bool any_ranges();
// The address of the cell was handed out while its bytes were in the mapping: they stay there.
bool stays_in_mapping(const Cell* c);

uint64_t sample_of(const void* data, uint64_t nbytes);  // a sum of some words
void note_sample_locked(Cell* c);
bool sample_agrees(const Cell* c, const void* data);
[[noreturn]] void throw_file_failed(const Cell* c, int error);

// Bytes of cells that still have their file for a copy.
uint64_t mapped_bytes();

}  // namespace memmgr::pager
