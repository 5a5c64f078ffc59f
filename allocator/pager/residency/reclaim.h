// Residency: who leaves so that a request fits, how bytes leave, and how they come back.
#pragma once

#include <atomic>
#include <cstdint>

#include "cells/cell.h"
#include "residency/victims.h"

namespace memmgr::pager {

// Bytes came back other than they left: the run must not go on with them (memmgr.RecomputeError).
class WrongBytes : public c10::Error {
 public:
  using c10::Error::Error;
};

// What the arena calls from inside malloc (rule 11): no op, no GIL. Returns the bytes that were released.
uint64_t reclaim_callback(void* user, uint64_t need, uint64_t request, int attempt);
[[noreturn]] void throw_out_of_memory(uint64_t request);
// Until it ends no allocation gets this room. Meanwhile what it is for is counted as outside.
class Promised {
 public:
  Promised(mm_arena* arena, uint64_t nbytes) : arena_(arena), nbytes_(static_cast<int64_t>(nbytes)) {
    mm_arena_promise_outside(arena_, nbytes_);
  }
  ~Promised() { mm_arena_promise_outside(arena_, -nbytes_); }
  Promised(const Promised&) = delete;
  Promised& operator=(const Promised&) = delete;

 private:
  mm_arena* arena_;
  int64_t nbytes_;
};
// Nanoseconds that this thread has waited for room, or for bytes to be back, each counted once. They go on counting.
const uint64_t& waited_ns();
class Wait {
 public:
  Wait();
  // The part of it that no inner wait has counted.
  uint64_t end();

 private:
  uint64_t begun_, before_;
};

// Takes the bytes of `c` away if nobody has pinned it. Returns how many. No lock is held.
uint64_t let_go(Cell* c, Way way = Way::kCheaper);
// The same in two steps: nobody else moves a cell that was claimed.
bool claim_locked(Cell* c);
uint64_t leave_claimed(Cell* c, Way way);
void exhume();  // what torture has buried, at the end of a budget
// Throws if the bytes are not those that left, where a checksum was kept. The caller has the cell busy.
void check_sum(Cell* c, const void* data);
bool sum_agrees(Cell* c, const void* data);
// Counted: while it is above 0 reclaim waits a while for its end and then has nothing to give.
void nothing_leaves(bool begin);
bool nothing_leaves_locked();
void hold_departures(bool begin);  // the same, whichever thread asks for room
// While one lives, what leaves at its thread's requests goes to the tier, where there is one, whatever it costs.
struct NothingIsDropped {
  NothingIsDropped();
  ~NothingIsDropped();
};
void stay_in_child();  // the same in a forked child, for ever
// The bytes are in memory when this returns. The caller has a pin on the cell and holds its storage. No lock is held.
void bring_back(Cell* c);
// The same for a cell that nobody needs at this moment: it may leave again at once. The caller holds its storage.
void fetch(Cell* c);
// Waits until nobody moves the cell. True: the bytes are away, and the caller, who has a pin, has the cell busy. False:
// they are here.
bool begin_coming_back(Cell* c);

// The most that has been pinned and could not leave, with the request that came to it.
void note_floor(uint64_t bytes);
// Of something that can be cut: how much of it has to be in memory at once. All of it, where `whole` is 0.
struct Share {
  uint64_t part = 0, whole = 0;
  uint64_t of(uint64_t bytes) const {
    return part < whole ? static_cast<uint64_t>(static_cast<double>(bytes) * part / whole) : bytes;
  }
};
// What no request can make leave: what is small or no cell, has escaped, is under way or newborn; roots, without a
// tier.
uint64_t bytes_that_stay();
// The same of something that runs: what it has pinned (`cell_at` of 0 to n), its own memory since begin_scratch(), and
// what can never leave.
void note_working_set(uint64_t pinned_bytes, Share at_once);
// Of these cells what bytes_that_stay() does not count.
template <class CellAt>
uint64_t bytes_beside_what_stays(size_t n, CellAt&& cell_at) {
  const bool roots_stay = !may_be_offloaded();  // they are counted as what never leaves
  uint64_t pinned = 0;
  for (size_t i = 0; i < n; ++i) {
    const Cell* c = cell_at(i);
    bool again = c->newborn || c->held > 0 || (roots_stay && c->root);
    for (size_t k = 0; k < i && !again; ++k) again = cell_at(k) == c;
    if (!again) pinned += c->nbytes;
  }
  return pinned;
}
template <class CellAt>
void note_working_set(size_t n, CellAt&& cell_at, Share at_once = {}) {
  note_working_set(bytes_beside_what_stays(n, cell_at), at_once);
}
// What this thread was refused last, once that is an error and not a try that was made again.
void note_refused();
void refuse_beside(uint64_t nbytes);  // this thread has to have so much besides what it found no room for
uint64_t refused_bytes();             // the same, of a try
std::string refusal();                // the error's text, once: what threw may have made another one of it
uint64_t floor_bytes();
void reset_floor();
// The most that was resident after an op, since the same moment.
extern std::atomic<uint64_t> most_resident;

// Blocks the GIL's holder least: releases the GIL if this thread has it.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  void* saved_ = nullptr;
};

}  // namespace memmgr::pager
