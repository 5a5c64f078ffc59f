// Storages whose bytes lie in a private mapping of a file: safetensors, from_pretrained and torch.load(mmap=True) make
// them. The file is a clean copy of the bytes until the first write.
//
// Words:
//   mapping  one mmap of a file
//   range    the part of a mapping that one storage has; several storages may have the same bytes
//
// The cell of such a storage is in the mapping when it is made, or absent where no page of it has been read. When it
// leaves, its pages are given back and the range stays mapped for as long as the cell lives. It comes back into memory
// of the pool: from the file, which the tier reads as a slot that is lent to it, or from the tier's own file once it
// was written. Where another storage has some of the same bytes the cell is back in the mapping before that one is
// used, and both stay there (Escape::kSlice). When a budget ends the bytes are in the mapping again.
//
// Known limitation: a storage over a whole file has no `filename` while it is a cell.
#pragma once

#include <c10/core/StorageImpl.h>

#include <memory>

#include "memmgr/core.h"

namespace memmgr::pager {

struct Cell;
struct Mapping;

struct MappedRange {
  std::shared_ptr<Mapping> mapping;
  char* begin = nullptr;
  uint64_t nbytes = 0;
  at::DataPtr home;          // the storage's own pointer, while the bytes are elsewhere
  mm_slot lent = -1;         // over the file, of the open budget's tier
  bool clean = false;        // the cell has ended, and its pages are the file's
  bool overwritten = false;  // the file has been: the bytes never go back to the mapping
  bool sampled = false;
  uint64_t sample = 0;  // of some words of the bytes, as they left

  MappedRange() = default;
  MappedRange(const MappedRange&) = delete;
  MappedRange& operator=(const MappedRange&) = delete;
  ~MappedRange();  // takes no lock of ours and not the GIL
};

// Asks for torch's own functions once; the GIL is held.
void learn_mapped();
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
// Gives the pages of the range back to the kernel. The file or the tier has their bytes. The caller has the cell busy.
void drop_pages(const MappedRange& range);

// Cells of other storages that have some bytes of `s` go back to the mapping for good. True: there are some. No lock is
// held. Throws if one cannot: its address was handed out, or an op or a pin that does not end uses it.
bool share_mapping(c10::StorageImpl* s);
// Moves the bytes to the address that the storage had first. False: an op uses them where they are, or the file has
// changed and the pool has the bytes. Throws if a changed file was the only copy. The caller holds the storage.
bool return_to_mapping(Cell* c);
// The file at this path is about to be overwritten: cells over it are read into memory of the pool, and may leave for
// the tier. Throws as share_mapping does.
void forsake_file(const char* path);

void note_sample_locked(Cell* c);
bool sample_agrees(const Cell* c, const void* data);
[[noreturn]] void throw_file_failed(const Cell* c, int error);

// Bytes of cells that still have their file for a copy.
uint64_t mapped_bytes();

}  // namespace memmgr::pager
