// Storages whose bytes lie in a private mapping of a file: safetensors, from_pretrained and torch.load(mmap=True) make
// them. The file is a clean copy of the bytes until the first write.
//
// Words:
//   mapping  one mmap of a file
//   range    the part of a mapping that one storage has; several storages may have the same bytes
//
// The cell of such a storage is made in the mapping, or absent if no page of it has been read. When it is evicted, its
// pages are given back to the kernel, and the range stays mapped for as long as the cell lives. The cell is restored
// into memory of the pool: from the file, which the tier reads as a slot that is lent to it, or from the tier's own
// file once the cell was written. If another storage has some of the same bytes, the cell moves back to the mapping
// before that storage is used, and both stay there (Escape::kSlice). When a budget ends the bytes move back to the
// mapping.
//
// Known limitation: a storage over a whole file has no `filename` while it is a cell.
#pragma once

#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <memory>

#include "memmgr/core.h"

namespace memmgr::pager {

struct Mapping;

struct MappedRange {
  std::shared_ptr<Mapping> mapping;
  char* begin = nullptr;
  uint64_t nbytes = 0;
  at::DataPtr home;          // the storage's own pointer, while the bytes are elsewhere
  mm_slot lent = -1;         // a slot over the file, of the open budget's tier; -1: none
  bool clean = false;        // the cell has ended, and its pages are the file's
  bool overwritten = false;  // the file was overwritten: the bytes never move back to the mapping
  bool sampled = false;
  uint64_t sample = 0;  // a checksum of some words of the bytes when they were evicted

  MappedRange() = default;
  MappedRange(const MappedRange&) = delete;
  MappedRange& operator=(const MappedRange&) = delete;
  ~MappedRange();  // takes no lock of the pager and not the GIL
};

// Gives the pages of the range back to the kernel. The file or the tier has their bytes. The caller has the cell busy.
void drop_pages(const MappedRange& range);

// The deleter of a slice of a storage, whose context is the whole storage; null before learn_mapped().
extern c10::DeleterFnPtr end_of_slice;
// Looks up torch's functions once. The GIL is held.
void learn_mapped();

}  // namespace memmgr::pager
