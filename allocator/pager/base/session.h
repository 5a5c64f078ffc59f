// Session: the open budget. Its pool, its tier, its options and its counters.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "base/constants.h"
#include "base/lock.h"
#include "memmgr/core.h"

namespace memmgr::pager {

class Pool;

// Changed under the graph's lock and read by any thread: plain stores, since atomic additions would cost an op 0.1 us.
class SumUnderLock {
 public:
  uint64_t load() const { return sum_.load(std::memory_order_relaxed); }
  void operator+=(uint64_t n) REQUIRES(graph_lock()) { sum_.store(load() + n, std::memory_order_relaxed); }
  void operator-=(uint64_t n) REQUIRES(graph_lock()) { sum_.store(load() - n, std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> sum_{0};
};

struct Options {
  uint64_t small_bytes = 64 << 10;  // smaller storages are counted and never paged
  bool may_evict = true;
  bool may_offload = true;
  bool torture = false;  // the cells of an op are evicted after it
  bool verify = false;   // every restored cell is compared with its checksum
  bool prefetch = true;  // bytes may be read before an op needs them
  uint32_t sample = 64;  // without `verify` one cell in so many
  Order order = Order::kDtr;
  bool window = false;       // a request without a run of addresses evicts neighbours; pages move if that does not help
  bool search = false;       // victims for `window` are searched: the blocks have addresses, and there is a limit
  uint64_t slice_bytes = 0;  // of list ops (list_ops.h); 0: a share of the budget. For tests
};

struct Counters {
  std::atomic<uint64_t> evictions{0}, evicted_bytes{0}, offloads{0}, packed{0}, offload_bytes{0}, clean_drops{0},
      reloads{0}, reload_bytes{0}, rematerialized_ops{0}, rematerializations{0}, remat_ns{0}, stall_ns{0}, room_ns{0},
      own_ns{0}, reclaims{0}, adopted_bytes{0}, escapes{0}, trials{0}, refused_kinds{0}, tier_errors{0},
      copies_before_write{0}, trap_retries{0}, retries{0}, foreign_writes{0}, unseen_ops{0}, cut_recipes{0},
      reads_ahead{0}, writes_ahead{0}, late_reads{0}, planned_periods{0}, left_periods{0}, short_periods{0},
      loop_turns{0}, slices{0}, pending_slices{0}, departures{0};
  SumUnderLock recorded_ops;
  uint64_t ops_before = 0;  // ops that threads had counted when the budget opened (kernel_slots.h)
};

// A budget from its opening to its end. The process has one such object for all its budgets, which follow one another
// (dispatch/the_session.h). A reference to it is valid at any time. Cells and blocks outlive budgets: after one has
// ended `open` is false, `tier` is null, and `pool` and `arena` are still its own.
struct Session {
  Session() = default;
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  std::atomic<bool> open{false};
  Pool* pool = nullptr;       // one for each device; its budgets use it one after another
  mm_arena* arena = nullptr;  // the pool's
  mm_tier* tier = nullptr;
  bool tier_writes = false;    // false: it only reads files that are lent to it
  bool tier_has_file = false;  // false: it has page-locked memory alone
  // A graph, or a collective, that is older than this budget may have the address of any adopted storage.
  bool adopted_stay = false;
  Options options;
  Counters counters;

  // The tier's name in errors.
  const char* tier_name() const { return tier_has_file ? "disk" : "host"; }
  // Returns true if cells may be written to the tier.
  bool may_offload() const { return options.may_offload && tier_writes; }
  // Counts an error of the tier and keeps its text for the errors that follow.
  void note_tier_error(int error);

  Lock& error_lock = lock_of(LockId::kTierError);
  std::string tier_error GUARDED_BY(error_lock);  // the last one
};

// Returns the bytes as the allocator counts them.
inline uint64_t rounded(uint64_t bytes) { return (bytes + MM_UNIT - 1) / MM_UNIT * MM_UNIT; }

}  // namespace memmgr::pager
