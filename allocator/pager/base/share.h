// The bytes of an op that have to be resident at once.
#pragma once

#include <cstdint>

namespace memmgr::pager {

// The largest slice of an op that runs in slices: `part` of `whole` bytes. whole 0: the op is not cut, so all of its
// bytes have to be resident at once.
struct Share {
  uint64_t part = 0, whole = 0;
  uint64_t of(uint64_t bytes) const {
    return part < whole ? static_cast<uint64_t>(static_cast<double>(bytes) * part / whole) : bytes;
  }
};

}  // namespace memmgr::pager
