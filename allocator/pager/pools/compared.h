// The results of two runs of an op, compared word by word.
#pragma once

#include <cstdint>

namespace memmgr::pager {

struct Compared {
  bool equal = true;
  bool gaps = false;   // words of the second run that the op may not have written
  bool other = false;  // a word that the op has written is another one
};

// Adds the comparison of two blocks on the host. `second` was made in memory full of the byte `fill`: a word that still
// holds it may be a gap. Below 0: it was not filled, and every word counts as written.
void compare(const void* first, const void* second, uint64_t nbytes, int fill, Compared* found);

}  // namespace memmgr::pager
