// Pages: how an address range gets and loses its memory.
//
// Words:
//   page     the step in which memory can be given and taken back (4 KiB here; 2 MiB for CUDA's virtual memory)
//   commit   make a page usable; it counts against the budget from then on
//   hole     a page of the range that is not committed
#pragma once

#include <cstddef>
#include <cstdint>

namespace memmgr {

// The seam for another kind of memory: a CUDA arena brings its own five functions and nothing above changes.
struct PageOps {
  size_t page_bytes;                          // a power of two
  void* (*reserve)(size_t bytes);             // addresses without memory; nullptr when there are not enough
  int (*commit)(void* at, size_t bytes);      // 0 or -errno
  int (*decommit)(void* at, size_t bytes);    // 0 or -errno; the addresses stay reserved, the contents are lost
  void (*release)(void* base, size_t bytes);  // undoes reserve
};

const PageOps& HostPages();

// One bit per page: set when the page is committed. The bits lie in memory of their own that costs nothing until it is
// touched, so that a map over a huge reserve is cheap.
class PageMap {
 public:
  explicit PageMap(uint64_t pages);
  ~PageMap();
  PageMap(const PageMap&) = delete;
  PageMap& operator=(const PageMap&) = delete;

  // All ranges are [first, end).
  uint64_t CountHoles(uint64_t first, uint64_t end) const;
  void Set(uint64_t first, uint64_t end);
  void Clear(uint64_t first, uint64_t end);
  // The first page in [first, end) whose bit is `value`, or end.
  uint64_t Next(uint64_t first, uint64_t end, bool value) const;
  // One past the last page in [first, end) whose bit is `value`, or first.
  uint64_t Previous(uint64_t first, uint64_t end, bool value) const;

 private:
  void Fill(uint64_t first, uint64_t end, bool value);

  uint64_t* words_;
  uint64_t words_bytes_;
  // No page at or above was ever committed; it keeps the scans away from the untouched end.
  uint64_t frontier_ = 0;
};

}  // namespace memmgr
