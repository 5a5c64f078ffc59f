// Detects changes of bytes; no defence against somebody who means to collide.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace memmgr::pager {

// Four lanes of multiply-rotate over 32-byte strides: limited by memory, not by arithmetic.
inline uint64_t checksum(const void* p, size_t n) {
  constexpr uint64_t kPrime = 0x9E3779B185EBCA87ull;
  uint64_t lane[4] = {1, 2, 3, 4};
  const auto* bytes = static_cast<const unsigned char*>(p);
  size_t i = 0;
  for (; i + 32 <= n; i += 32) {
    uint64_t w[4];
    std::memcpy(w, bytes + i, 32);
    for (int k = 0; k < 4; ++k) {
      lane[k] = (lane[k] ^ w[k]) * kPrime;
      lane[k] = (lane[k] << 31) | (lane[k] >> 33);
    }
  }
  uint64_t h = n * kPrime;
  for (const uint64_t v : lane) h = ((h ^ v) * kPrime) ^ (h >> 29);
  for (; i < n; ++i) h = (h ^ bytes[i]) * kPrime;
  return h ^ (h >> 32);
}

}  // namespace memmgr::pager
