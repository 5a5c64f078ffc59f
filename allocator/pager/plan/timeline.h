// The timeline of a period: which ops touched which cells, in order (design section 5). A period runs from the end of
// one outermost backward to the end of the next; where there is none, it is a turn of the program's loop (loops.h). It
// is noted only once memory has been short.
//
// A cell's *ordinal* is the order in which the period met it; an op that touches a cell has a *position*. Both are the
// same in every period that does the same, whatever the addresses are: that is how a plan is followed (follow.h).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cells/types.h"
#include "ops/op_info.h"

namespace memmgr::pager {

constexpr uint32_t kNoOrdinal = ~0u;
// Of a cell that this period has not met yet: the ordinal that it had in the period before.
constexpr uint32_t kBefore = 1u << 31;

constexpr uint8_t kTouchWrites = 1;
constexpr uint8_t kTouchMakes = 2;   // the cell was born in this op
constexpr uint8_t kTouchRecipe = 4;  // of what it makes or writes: its op may run again
constexpr uint8_t kTouchFirst = 8;   // nothing of it was known in this period
constexpr uint8_t kTouchComes = 16;  // nor was it a cell when the period began, and no op has made it: resized, a batch

struct TouchNote {
  uint32_t ordinal;
  uint8_t flags;
  uint32_t bits = 0;  // bytes of what it makes or writes where that is packed; 0: it is not
};

struct OpNote {
  OpInfo* info;
  uint32_t first_touch;  // the op's touches go up to the next op's
  float seconds = 0;     // its own
  float before = 0;      // since the op before ended, waiting for memory left out
  uint64_t scratch = 0;  // beyond its outputs
  uint64_t other = 0;    // bytes that were resident and no cell's
  uint32_t module = 0;   // as Python numbers them; 0: not known
  // On a device whose periods are timed: the points around what the op has queued, and whether its stream was made to
  // wait in between.
  int begins = -1, ends = -1;
  bool waited = false;
};

// The period that is noted takes the device's time for each op.
extern std::atomic<bool> times_ops;

// Of one op, as it runs: nothing happens unless it is begun.
class OpTimer {
 public:
  void begin();
  void end() {
    if (C10_UNLIKELY(points_ != nullptr)) end_timed();
  }
  // The op is this one of the period with these points.
  void tell(OpNote* note, const std::shared_ptr<mm_points>& points) const;

 private:
  void end_timed();

  std::shared_ptr<mm_points> points_;
  int begins_ = -1, ends_ = -1;
  uint64_t waits_ = 0;  // of the device's streams so far; at the end those since the beginning
};

struct Timeline {
  std::vector<OpNote> ops;
  std::vector<TouchNote> touches;
  std::vector<uint64_t> hashes;                       // of all up to each position
  std::vector<uint64_t> sizes;                        // by ordinal
  std::vector<uint8_t> fixed;                         // by ordinal: it cannot leave (escaped)
  std::vector<uint32_t> prior;                        // by ordinal: its ordinal in the period before, or kNoOrdinal
  std::vector<std::pair<uint32_t, uint32_t>> deaths;  // (ops begun, ordinal)
  int64_t turn = -1;                                  // the op at which the first backward began
  uint64_t backwards = 0;                             // that began in it
  uint64_t trials = 0;                                // kinds that were tried meanwhile
  uint64_t before = 0;                                // the hash of the period before; 0: it was not noted
  std::shared_ptr<mm_points> points;                  // of the device's times; null: it was not timed
  bool overflow = false;

  uint64_t hash() const { return hashes.empty() ? 0 : hashes.back(); }
};

extern std::atomic<bool> timeline_on;

// Whether it was, in this period, what the cell with that ordinal was.
bool was_ordinal_locked(const Version* v, uint32_t ordinal);
// The cell of this period with that ordinal; null: it has died.
Cell* cell_of_ordinal_locked(uint32_t ordinal);
// The cell with that ordinal of the last period that had this hash: the one before, or the last turn that was the same
// as the one before it, whatever came since. Null: it has died, or there is none.
Cell* cell_before_locked(uint32_t ordinal, uint64_t hash);

// The device's times of a period that was timed, in place of the host's, as far as they are known. Waits for the
// device. An op whose stream was made to wait has the least that an op like it has taken so far. Known limitation: ops
// are alike that touch cells of the same lengths, whatever their shapes.
void take_device_times(Timeline* t);

constexpr size_t kMostOps = 200000;  // a longer sequence is no period

// The period that is being noted. Guarded by the graph's lock.
struct Period {
  uint32_t number = 1;
  bool asked = false;  // for: it goes from backward to backward
  bool loop = false;   // it is a turn of a loop, and the same as one whose cells are larger (a cache that grows)
  Timeline noted;
  std::vector<Cell*> live;      // by ordinal
  std::vector<Cell*> previous;  // of the period before, by its ordinals
  uint64_t running = 0x9E3779B97F4A7C15ull;
  uint64_t last_end = 0;  // ticks
  uint64_t trials_before = 0;
  uint64_t begun = 0;  // serials from here on are of cells that came in it
};
Period& period_locked();
// The op has the next position in the period, which is returned.
uint32_t begin_op_locked(Period& p, OpInfo* info, uint64_t now);
void touch_locked(Period& p, Cell* c, bool written, bool made);
// The next period begins. Returns the one that ends.
Timeline begin_next_locked(Period& p, bool noted);
// A whole turn of a loop, the same as the one before, has ended: its cells are those of `p.previous`.
void keep_steady_locked(const Timeline& turn, const Period& p);
void forget_steady_locked();

}  // namespace memmgr::pager
