// The floor: the least budget in which the program has run so far, and requests that found no room.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "base/budget.h"
#include "base/share.h"
#include "cells/types.h"

namespace memmgr::pager {

// The most that has been pinned and could not leave, with the request that came to it.
void note_floor(uint64_t bytes);
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

// This thread's request for so many bytes, beside all that stays, is refused with this text.
void begin_refusal(uint64_t bytes, const std::string& text);

// The op of this thread that found no room.
struct FailedOp {
  std::string name;           // empty: the request came from no op
  uint64_t need_bytes = 0;    // all that it reads and makes, and the bytes that stay; 0: not known
  uint64_t read_bytes = 0;    // its arguments
  uint64_t result_bytes = 0;  // its largest result, or request; the largest tensor that it reads, where none is known
};
FailedOp& failing_op();
FailedOp take_failed_op();  // once

}  // namespace memmgr::pager
