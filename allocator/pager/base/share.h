// The share of an op's memory that has to be resident at once.
#pragma once

#include <cstdint>

namespace memmgr::pager {

// The share of an op that can be cut: `part` of `whole` bytes. whole 0: all bytes have to be resident at once.
struct Share {
  uint64_t part = 0, whole = 0;
  uint64_t of(uint64_t bytes) const {
    return part < whole ? static_cast<uint64_t>(static_cast<double>(bytes) * part / whole) : bytes;
  }
};

}  // namespace memmgr::pager
