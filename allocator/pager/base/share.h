// How much of an op's memory has to be there at once.
#pragma once

#include <cstdint>

namespace memmgr::pager {

// Of something that can be cut: how much of it has to be in memory at once. All of it, where `whole` is 0.
struct Share {
  uint64_t part = 0, whole = 0;
  uint64_t of(uint64_t bytes) const {
    return part < whole ? static_cast<uint64_t>(static_cast<double>(bytes) * part / whole) : bytes;
  }
};

}  // namespace memmgr::pager
