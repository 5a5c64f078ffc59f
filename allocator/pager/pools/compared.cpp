#include "pools/compared.h"

#include <algorithm>
#include <cstring>

namespace memmgr::pager {

using Word = uint32_t;  // no longer than a gap: a longer word could hide one behind written bytes

void compare(const void* first, const void* second, uint64_t nbytes, int fill, Compared* found) {
  const auto* one_at = static_cast<const char*>(first);
  const auto* two_at = static_cast<const char*>(second);
  bool equal = true, written = false;
  Word filled;
  std::memset(&filled, fill, sizeof filled);
  for (uint64_t at = 0; at < nbytes; at += sizeof filled) {
    Word one = filled, two = filled;
    const uint64_t n = std::min<uint64_t>(sizeof filled, nbytes - at);
    std::memcpy(&one, one_at + at, n);
    std::memcpy(&two, two_at + at, n);
    const bool left_alone = fill >= 0 && two == filled;
    equal &= one == two;
    found->gaps |= left_alone;
    found->other |= one != two && !left_alone;
    written |= !left_alone;
  }
  found->equal &= equal;
  found->other |= !equal && !written;  // an op that wrote nothing has no result to compare
}

}  // namespace memmgr::pager
