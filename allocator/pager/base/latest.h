// A time that only increases.
#pragma once

#include <atomic>
#include <cstdint>

namespace memmgr::pager {

// Keeps the later time: two threads may have read the clock in one order and come here in the other.
inline void raise_to(std::atomic<uint64_t>& latest, uint64_t time) {
  uint64_t before = latest.load(std::memory_order_relaxed);
  while (before < time && !latest.compare_exchange_weak(before, time, std::memory_order_relaxed)) {
  }
}

}  // namespace memmgr::pager
