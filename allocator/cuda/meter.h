// The figures of torch.cuda.memory_stats and memory_snapshot for one device, and the limits on its memory. Knows no
// torch, so that it runs in tests on a double of the driver.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "memmgr/device.h"

namespace memmgr {

// torch's four figures: now, the highest since the last reset of peaks, and the sums of allocations and frees since the
// last reset of sums.
struct Count {
  int64_t current, peak, allocated, freed;
};

// torch's three rows. Its small pool is for requests of up to 1 MiB; ours is the small-block area (up to 8 KiB). Pages
// are counted as the large one's.
enum Pool { kAll = 0, kSmall = 1, kLarge = 2, kPools = 3 };

struct MemoryStats {
  Count blocks[kPools];
  Count bytes[kPools];            // after alignment
  Count requested_bytes[kPools];  // before
  Count reserved_bytes;           // pages with memory behind them
  Count pages;                    // pieces of memory that the driver has given
  int64_t out_of_memory;
  int64_t retries;  // allocations that fitted, or failed, only after free pages had been given back
  int64_t synchronizations;
};

// A run of committed pages. `pieces` cover it without gaps, in address order.
struct Piece {
  uint64_t address, bytes, requested_bytes;
  bool live;
};
struct Segment {
  uint64_t address, bytes, requested_bytes, live_bytes;
  std::vector<Piece> pieces;
};

class Meter {
 public:
  // The device's memory has at least `least_total_bytes`, also where the driver says less.
  explicit Meter(mm_device* device, uint64_t least_total_bytes = 0);

  mm_device* device() const { return device_; }
  mm_arena* arena() const { return mm_device_arena(device_); }

  // Called behind every allocation, and before every free.
  void Allocated(const void* p, size_t requested_bytes);
  void Freed(const void* p);
  void Failed();
  void Retried();

  MemoryStats Stats();
  void ResetPeaks();
  void ResetSums();
  // As cheap as two atomic reads: torch's profiler gets it with every block.
  int64_t live_bytes();

  // The arena's budget is the lower one of `budget_bytes` and of the share of the device that the program allows itself
  // (1: no limit).
  void SetBudget(uint64_t budget_bytes);
  void SetFraction(double fraction);
  double fraction();
  uint64_t total_bytes() const { return total_bytes_; }
  // The bytes that the share allows, or MM_UNLIMITED.
  uint64_t allowed_bytes();

  std::vector<Segment> Segments() const;

 private:
  // `allocated` is not kept: it is the present value, less the value at the reset, plus the frees.
  struct Tally {
    int64_t current = 0, peak = 0, freed = 0, at_reset = 0;
    void Add(int64_t amount) {
      current += amount;
      if (current > peak) peak = current;
    }
    void Take(int64_t amount) {
      current -= amount;
      freed += amount;
    }
    Count Read() const { return {current, peak, current - at_reset + freed, freed}; }
    void ResetPeak() { peak = current; }
    void ResetSums() { freed = 0, at_reset = current; }
  };
  struct Row {
    Tally blocks, bytes, requested;
  };

  void SamplePages();        // under the lock
  void Limit();              // under the lock
  uint64_t Allowed() const;  // under the lock
  template <typename Act>
  void ForEach(Act act);

  mm_device* const device_;
  uint64_t total_bytes_ = 0;
  std::mutex lock_;  // a leaf but for those of the core
  Row rows_[kPools];
  // Figures of pages: updated whenever the blocks reach a new peak, and at every query. Pages that were mapped and
  // unmapped between two queries are not in the sums.
  Tally reserved_;
  int64_t arena_peak_at_reset_ = 0, pages_peak_ = 0;
  uint64_t maps_ = 0, unmaps_ = 0, maps_at_reset_ = 0, unmaps_at_reset_ = 0;
  int64_t out_of_memory_ = 0, retries_ = 0;
  uint64_t budget_bytes_ = MM_UNLIMITED;
  double fraction_ = 1;
};

}  // namespace memmgr
