// What the kernel says of this process's addresses: /proc/self/maps and pagemap.
#pragma once

#include <cstdint>
#include <string>

namespace memmgr::pager {

constexpr uintptr_t kPage = 4096;

struct Area {
  uintptr_t begin = 0, end = 0;  // end 0: nothing is mapped there
  uint64_t offset = 0;           // in the file, of `begin`
  char file[64] = {};            // device and inode, as the kernel writes them
  std::string path;              // empty: of no file
  bool is_private = false;       // writes are not the file's
};
Area area_around(const void* address);  // reads a list of all areas: a fraction of a millisecond

// Of the pages of a range: was one read, and was one written or never a file's? Where the kernel does not say: both.
struct Pages {
  bool present = true, written = true;
};
Pages look_at_pages(const char* begin, uint64_t nbytes);

}  // namespace memmgr::pager
