// Cells over ranges of mapped files (file_range.h): how they begin and end, and if the file is still their copy.
#pragma once

#include <string>
#include <vector>

#include "cells/file_range.h"
#include "cells/types.h"

namespace memmgr::pager {

// One mmap of a file. Its cells are guarded by the graph's lock.
struct Mapping {
  uintptr_t begin = 0, end = 0;
  uint64_t offset = 0;  // the offset of `begin` in the file
  std::string path;
  int fd = -1;  // -1: the file cannot be found
  std::vector<Cell*> cells;

  ~Mapping();
};

// Returns true if the bytes lie in a private mapping. Cheap.
bool is_mapped(const c10::StorageImpl* s);

// Returns true if the storage is a slice of one that is a cell.
bool is_part_of_cell(const c10::StorageImpl* s);

// Returns false if a cell of another storage has some of these bytes and is not in the mapping for good.
bool may_begin_range_locked(const c10::StorageImpl* s) REQUIRES(graph_lock());
// Begins the range of a new cell whose bytes lie at its pointer. Records the file as its copy.
void begin_range_locked(Cell* c) REQUIRES(graph_lock());
// Returns true if no page of the cell has been read: it needs no memory before its first use.
bool begins_away_locked(const Cell* c) REQUIRES(graph_lock());
// Ends the range of the cell. The caller destroys it without the lock.
std::unique_ptr<MappedRange> end_range_locked(Cell* c) REQUIRES(graph_lock());
// Visits the cells of other storages over bytes of `s`.
void each_over_locked(const c10::StorageImpl* s, c10::function_ref<void(Cell*)> visit) REQUIRES(graph_lock());
// Returns all mappings that have, or had, cells.
std::vector<std::shared_ptr<Mapping>> living_mappings_locked() REQUIRES(graph_lock());
bool any_ranges();
// Returns true if the address was handed out while the bytes were in the mapping: they stay there.
bool stays_in_mapping(const Cell* c);

uint64_t sample_of(const void* data, uint64_t nbytes);  // a checksum of some words
void note_sample_locked(Cell* c) REQUIRES(graph_lock());
bool sample_agrees(const Cell* c, const void* data);
[[noreturn]] void throw_file_failed(const Cell* c, int error);

// Returns the bytes of cells whose file is still their copy.
uint64_t mapped_bytes();

}  // namespace memmgr::pager
