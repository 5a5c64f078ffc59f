#include "base/mapped_areas.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace memmgr::pager {

Area area_around(const void* address) {
  Area found;
  FILE* maps = std::fopen("/proc/self/maps", "re");
  if (!maps) return found;
  char* line = nullptr;
  size_t room = 0;
  const auto at = reinterpret_cast<uintptr_t>(address);
  while (getline(&line, &room, maps) > 0) {
    uintptr_t begin, end;
    char flags[5], device[16];
    unsigned long long offset, inode;
    int path_at = 0;
    if (std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s %llx %15s %llu %n", &begin, &end, flags, &offset, device,
                    &inode, &path_at) < 6 ||
        at < begin || at >= end)
      continue;
    found.begin = begin;
    found.end = end;
    found.offset = offset;
    found.is_private = flags[3] == 'p';
    std::snprintf(found.file, sizeof found.file, "%s %llu", device, inode);
    if (inode != 0) found.path = line + path_at;
    if (!found.path.empty() && found.path.back() == '\n') found.path.pop_back();
    break;
  }
  std::free(line);
  std::fclose(maps);
  return found;
}

Pages look_at_pages(const char* begin, uint64_t nbytes) {
  constexpr uint64_t kPresent = uint64_t{1} << 63, kSwapped = uint64_t{1} << 62, kOfFile = uint64_t{1} << 61;
  const int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  Pages found{false, false};
  const auto first = reinterpret_cast<uintptr_t>(begin) / kPage;
  const auto last = (reinterpret_cast<uintptr_t>(begin) + nbytes + kPage - 1) / kPage;
  std::vector<uint64_t> entries(4096);
  for (uintptr_t at = first; at < last && !found.written;) {
    const size_t n = std::min<size_t>(entries.size(), last - at);
    const ssize_t got = pread(fd, entries.data(), n * sizeof(uint64_t), static_cast<off_t>(at * sizeof(uint64_t)));
    if (got <= 0) {
      found = {};
      break;
    }
    const auto whole = static_cast<size_t>(got) / sizeof(uint64_t);
    for (size_t i = 0; i < whole; ++i) {
      if (!(entries[i] & (kPresent | kSwapped))) continue;
      found.present = true;
      found.written |= !(entries[i] & kOfFile);
    }
    at += whole;
  }
  close(fd);
  return found;
}

}  // namespace memmgr::pager
