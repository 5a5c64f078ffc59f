// torch's own allocator, where it has handed out memory before memmgr's came: its blocks live on, and it frees them.
// Part of plugin.cpp's unit.
//
// It allocates nothing any more. Its reserved memory, cached or in blocks, counts as outside in the device's arena.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <array>
#include <atomic>
#include <mutex>

#include "memmgr/device.h"

namespace memmgr {

class Earlier {
 public:
  using CUDAAllocator = c10::cuda::CUDACachingAllocator::CUDAAllocator;

  // Null: no memory was handed out before.
  CUDAAllocator* torchs() const { return torchs_.load(std::memory_order_acquire); }

  void Follow(CUDAAllocator* torchs) {
    torchs->attachAllocatorTraceTracker([this](const TraceEntry& entry) { Told(entry); });
    torchs_.store(torchs, std::memory_order_release);
    // Other threads allocate at the same time, so the look is repeated until nothing has changed during it.
    for (uint64_t before = ~uint64_t{0}; before != told_.load();) {
      before = told_.load();
      std::array<int64_t, kMost> found{};
      for (const auto& segment : torchs->snapshot({0, 0}, false).segments)
        if (segment.device >= 0 && segment.device < kMost)
          found[static_cast<size_t>(segment.device)] += static_cast<int64_t>(segment.total_size);
      std::lock_guard hold(lock_);
      for (size_t i = 0; i < kMost; ++i) Count(i, found[i] - reserved_[i]);
    }
  }

  // The device's memory has been opened.
  void CountIn(int ordinal, mm_arena* arena) {
    std::lock_guard hold(lock_);
    const auto i = static_cast<size_t>(ordinal);
    arenas_[i] = arena;
    mm_arena_add_outside(arena, reserved_[i]);
  }

  // Cached memory goes back to the device. Waits for it.
  void Trim() {
    freed_bytes_ = 0;
    torchs()->emptyCache({0, 0});
  }
  // Blocks of so many bytes were freed since the last trim.
  uint64_t freed_bytes() const { return freed_bytes_.load(std::memory_order_relaxed); }

 private:
  using TraceEntry = c10::CachingDeviceAllocator::TraceEntry;
  static constexpr int kMost = 64;

  void Count(size_t i, int64_t bytes) {  // under the lock
    reserved_[i] += bytes;
    if (arenas_[i]) mm_arena_add_outside(arenas_[i], bytes);
  }

  // Under torch's lock.
  void Told(const TraceEntry& entry) {
    if (entry.device_ < 0 || entry.device_ >= kMost) return;
    const auto bytes = static_cast<int64_t>(entry.size_);
    int64_t more = 0;
    switch (entry.action_) {
      case TraceEntry::SEGMENT_ALLOC:
      case TraceEntry::SEGMENT_MAP:
        more = bytes;
        break;
      case TraceEntry::SEGMENT_FREE:
      case TraceEntry::SEGMENT_UNMAP:
        more = -bytes;
        break;
      case TraceEntry::FREE_COMPLETED:
        freed_bytes_ += entry.size_;
        return;
      default:
        return;
    }
    ++told_;
    std::lock_guard hold(lock_);
    Count(static_cast<size_t>(entry.device_), more);
  }

  std::atomic<CUDAAllocator*> torchs_{nullptr};
  std::atomic<uint64_t> told_{0}, freed_bytes_{0};
  std::mutex lock_;  // a leaf but for the arena's
  std::array<int64_t, kMost> reserved_{};
  std::array<mm_arena*, kMost> arenas_{};
};

}  // namespace memmgr
