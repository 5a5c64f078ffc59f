// The timeline of a period: the ops in their order, and the cells that each touched. A period runs from the end of one
// outermost backward to the end of the next. Without a backward it is a turn of the program's loop (loops.h). It is
// noted only once memory has been short.
//
// A cell's *ordinal* counts the cells in the order of their first touch in the period. An op that touches a cell has a
// *position*. Both are the same in every period that does the same, at any addresses: a plan is followed by them
// (follow.h).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/constants.h"
#include "base/session.h"
#include "cells/types.h"
#include "ops/op_info.h"

namespace memmgr::pager {

constexpr uint32_t kNoOrdinal = ~0u;
struct TouchNote {
  uint32_t ordinal;
  uint8_t flags;      // kTouch... of base/constants.def
  uint32_t bits = 0;  // bytes of the version if packed; 0: it is not packed
};

struct OpNote {
  OpInfo* info;
  uint32_t first_touch;        // the op's touches go up to the next op's
  float seconds = 0;           // of the op alone
  float before = 0;            // seconds since the op before ended, without waits for memory
  uint64_t scratch = 0;        // bytes beyond its outputs
  uint64_t other = 0;          // resident bytes that belong to no cell
  uint32_t module = 0;         // the number that Python gave to the module; 0: not known
  int begins = -1, ends = -1;  // on a device, in a timed period: the points around the op's kernels
  int delayed = -1;            // the point before a delay that ends at `begins`; -1: there was none
};

// True: the period that is noted takes the device's time for each op.
extern std::atomic<bool> times_ops;

struct Timeline;

// Times one op on the device. Without `begin` it does nothing.
class OpTimer {
 public:
  OpTimer() = default;
  OpTimer(const OpTimer&) = delete;
  OpTimer& operator=(const OpTimer&) = delete;
  ~OpTimer();
  void begin(const Pool& pool, const OpInfo* info);
  void end() {
    if (C10_UNLIKELY(points_ != nullptr)) end_timed();
  }
  // Writes the points to the op if the period is the one that they were taken in. Called in the op's thread.
  void tell(Timeline* t, size_t op) const;

 private:
  void end_timed();

  const Pool* pool_ = nullptr;  // set with `points_`
  std::shared_ptr<mm_points> points_;
  int begins_ = -1, ends_ = -1, delayed_ = -1;
};

// The points around one of an op's searches for memory (Taking::searches).
struct MemorySearch {
  size_t op;
  int from, to;
};

struct Timeline {
  std::vector<OpNote> ops;
  std::vector<TouchNote> touches;
  std::vector<uint64_t> hashes;                       // by position: of all touches up to it
  std::vector<uint64_t> sizes;                        // by ordinal
  std::vector<uint8_t> fixed;                         // by ordinal: 1 if the cell cannot be evicted (escaped)
  std::vector<uint32_t> prior;                        // by ordinal: its ordinal in the period before, or kNoOrdinal
  std::vector<std::pair<uint32_t, uint32_t>> deaths;  // (ops begun, ordinal)
  int64_t turn = -1;                                  // the position at which the first backward began; -1: none
  uint64_t backwards = 0;                             // backwards that began in the period
  uint64_t trials = 0;                                // determinism checks during the period
  uint64_t before = 0;                                // the hash of the period before; 0: it was not noted
  std::shared_ptr<mm_points> points;                  // the device's times; null: the period was not timed
  std::vector<MemorySearch> searches;                 // in a timed period, by op
  bool of_device = false;                             // the device's times have been taken
  bool overflow = false;

  uint64_t hash() const { return hashes.empty() ? 0 : hashes.back(); }
};

extern std::atomic<bool> timeline_on;

// Returns true if the version was the current one of the cell with that ordinal, in this period.
bool was_ordinal_locked(const Version* v, uint32_t ordinal) REQUIRES(graph_lock());
// Returns the cell of this period with that ordinal; null: it has ended.
Cell* cell_of_ordinal_locked(uint32_t ordinal) REQUIRES(graph_lock());
// Returns the cell with that ordinal of the last period that had this hash. That is the period before, or the last turn
// of a loop that equalled the turn before it. Null: the cell has ended, or there is no such period.
Cell* cell_before_locked(uint32_t ordinal, uint64_t hash) REQUIRES(graph_lock());

// Replaces the host's times by the device's if the device is the slower of both. Waits for the device if the period was
// timed. An op gets the least time that a like op has taken so far, and the idle time before its first kernel is
// not its own. Ops that have met an idle device only are delayed in the next timed period. Known limitation: ops are
// alike if their cells have the same sizes, whichever shapes the tensors have.
void take_device_times(Timeline* t);

constexpr size_t kMostOps = 200000;  // a longer sequence is no period

// The period that is being noted. Guarded by the graph's lock.
struct Period {
  uint32_t number = 1;
  bool asked = false;  // True: the period runs from backward to backward.
  bool loop = false;   // True: the period is a turn of a loop. Its hash leaves sizes out, so that a cache may grow.
  Timeline noted;
  std::vector<Cell*> live;      // by ordinal
  std::vector<Cell*> previous;  // of the period before, by its ordinals
  uint64_t running = 0x9E3779B97F4A7C15ull;
  uint64_t last_end = 0;  // ticks
  uint64_t trials_before = 0;
  uint64_t begun = 0;  // cells with this serial or a later one were made in the period
};
Period& period_locked() REQUIRES(graph_lock());
// Gives the op the next position in the period, and returns it.
uint32_t begin_op_locked(const Session& session, Period& p, OpInfo* info, uint64_t now) REQUIRES(graph_lock());
void touch_locked(Period& p, Cell* c, bool written, bool made) REQUIRES(graph_lock());
// Begins the next period. Returns the one that ends.
Timeline begin_next_locked(const Session& session, Period& p, bool noted) REQUIRES(graph_lock());
// A whole turn of a loop that equalled the one before has ended. Its cells are `p.previous`.
void keep_steady_locked(const Timeline& turn, const Period& p) REQUIRES(graph_lock());
void forget_steady_locked() REQUIRES(graph_lock());

}  // namespace memmgr::pager
