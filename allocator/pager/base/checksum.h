// Detects changes of bytes. It is no defence against intended collisions.
#pragma once

#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "memmgr/device.h"

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

// The checksum of a cell's bytes when they were evicted, or none. A device may still be computing it.
class Checksum {
 public:
  Checksum() = default;
  explicit Checksum(uint64_t value) : value_(value), taken_(true) {}
  Checksum(mm_device* device, mm_sum* pending) : device_(device), pending_(pending), taken_(true) {}
  Checksum(Checksum&& other) noexcept
      : device_(other.device_),
        pending_(std::exchange(other.pending_, nullptr)),
        value_(other.value_),
        taken_(std::exchange(other.taken_, false)) {}
  Checksum& operator=(Checksum&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(pending_, other.pending_);
    std::swap(value_, other.value_);
    std::swap(taken_, other.taken_);
    return *this;
  }
  ~Checksum() {
    if (pending_) mm_device_sum_drop(device_, pending_);
  }

  bool taken() const { return taken_; }
  // Returns true if `value` does not wait.
  bool is_there() const { return !pending_ || mm_device_sum_is_there(device_, pending_) != 0; }
  // Waits for the device if it has to. For one thread at a time.
  uint64_t value() {
    if (mm_sum* const pending = std::exchange(pending_, nullptr)) {
      const int error = mm_device_sum_end(device_, pending, &value_);
      TORCH_CHECK(error == 0, "memmgr: the checksum of bytes that have left cannot be read: error ", error);
    }
    return value_;
  }

 private:
  mm_device* device_ = nullptr;
  mm_sum* pending_ = nullptr;
  uint64_t value_ = 0;
  bool taken_ = false;
};

}  // namespace memmgr::pager
