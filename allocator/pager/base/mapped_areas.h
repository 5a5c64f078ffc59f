// Mapped areas and pages of this process, by /proc/self/maps and /proc/self/pagemap.
#pragma once

#include <cstdint>
#include <string>

namespace memmgr::pager {

constexpr uintptr_t kPage = 4096;

struct Area {
  uintptr_t begin = 0, end = 0;  // end 0: nothing is mapped there
  uint64_t offset = 0;           // the offset of `begin` in the file
  char file[64] = {};            // device and inode, as the kernel writes them
  std::string path;              // empty: no file
  bool is_private = false;       // writes do not reach the file
};
Area area_around(const void* address);  // reads a list of all areas: a fraction of a millisecond

// The pages of a range. present: at least one is in memory or swapped. written: at least one is no page of a file. Both
// are true if the kernel does not answer.
struct Pages {
  bool present = true, written = true;
};
Pages look_at_pages(const char* begin, uint64_t nbytes);

}  // namespace memmgr::pager
