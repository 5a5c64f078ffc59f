// The open budget: its pool, its tier, what the user asked for, and what was counted.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "base/at_fork.h"
#include "memmgr/core.h"

namespace memmgr::pager {

class Pool;

// Changed under the graph's lock and read by anybody: plain stores, where atomic additions would cost an op 0.1 us.
class SumUnderLock {
 public:
  uint64_t load() const { return sum_.load(std::memory_order_relaxed); }
  void operator+=(uint64_t n) { sum_.store(load() + n, std::memory_order_relaxed); }
  void operator-=(uint64_t n) { sum_.store(load() - n, std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> sum_{0};
};

// Who leaves first when malloc has to choose by itself; kRanked: as a policy says ahead of need, DTR's order beneath
// it.
enum class Order : uint8_t { kDtr, kLru, kLargest, kDelta, kRanked };

struct Options {
  uint64_t small_bytes = 64 << 10;  // smaller storages are counted and never paged
  bool may_evict = true;
  bool may_offload = true;
  bool torture = false;  // everything leaves after every op
  bool verify = false;   // every cell that comes back meets its checksum
  bool prefetch = true;  // bytes may come back before an op needs them
  uint32_t sample = 64;  // otherwise one in so many
  Order order = Order::kDtr;
  int search = -1;             // how victims are found where addresses matter (MM_BY_*); -1: in the order of leaving
  int remap = MM_REMAP_FIRST;  // what answers a request that has its bytes and no run of them (MM_REMAP_*)
  uint64_t slice_bytes = 0;    // of list ops (list_ops.h); 0: a share of the budget. For tests
  bool apart = false;          // what is expensive to make again lies at the other end (Coop, section 4.2)
};

struct Budget {
  std::atomic<bool> open{false};
  std::atomic<bool> forked{false};  // the process is a forked child; if `open`, what its parent had away comes back
  Pool* pool = nullptr;             // one a device; budgets follow one another on it
  mm_arena* arena = nullptr;        // its
  mm_tier* tier = nullptr;
  bool tier_writes = false;  // else it reads files that are lent to it, and no more
  Options options;

  std::mutex& error_lock = taken_by_forks(new std::mutex);
  std::string tier_error;  // the last one
};

struct Counters {
  std::atomic<uint64_t> evictions{0}, evicted_bytes{0}, offloads{0}, packed{0}, offload_bytes{0}, clean_drops{0},
      reloads{0}, reload_bytes{0}, rematerialized_ops{0}, rematerializations{0}, remat_ns{0}, stall_ns{0}, room_ns{0},
      reclaims{0}, adopted{0}, adopted_bytes{0}, escapes{0}, trials{0}, refused_kinds{0}, tier_errors{0},
      copies_before_write{0}, trap_retries{0}, admission_waits{0}, retries{0}, foreign_writes{0}, unseen_ops{0},
      cut_recipes{0}, reads_ahead{0}, writes_ahead{0}, late_reads{0}, planned_periods{0}, left_periods{0},
      short_periods{0}, loop_turns{0}, slices{0}, pending_slices{0}, departures{0};
  SumUnderLock recorded_ops;
  uint64_t ops_before = 0;  // that threads had counted when the budget opened (unseen_threads.h)
};

extern Budget budget;
extern Counters counters;

// Cells may be written to the tier below.
inline bool may_be_offloaded() { return budget.options.may_offload && budget.tier_writes; }
void note_tier_error(int error);

// As the allocator counts them.
inline uint64_t rounded(uint64_t bytes) { return (bytes + MM_UNIT - 1) / MM_UNIT * MM_UNIT; }

}  // namespace memmgr::pager
