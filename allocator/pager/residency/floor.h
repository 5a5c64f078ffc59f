// The floor: the smallest budget in which the program has run so far. Also requests that found no room.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "base/session.h"
#include "base/share.h"
#include "cells/types.h"

namespace memmgr::pager {

// Raises the floor to `bytes`: pinned bytes and bytes that cannot be evicted, with one request.
void note_floor(uint64_t bytes);
// Returns the bytes that no request can free: small cells, memory that belongs to no cell, and cells that have escaped,
// are pinned for long or are uninitialized. Without a tier also roots.
uint64_t bytes_that_stay(const Session& session);
// Raises the floor to a working set: the pinned cells (`cell_at` of 0 to n), the thread's own memory since
// begin_scratch(), and bytes_that_stay().
void note_working_set(const Session& session, uint64_t pinned_bytes, Share at_once);
// Returns the bytes of these cells that bytes_that_stay() does not count.
template <class CellAt>
uint64_t bytes_beside_what_stays(const Session& session, size_t n, CellAt&& cell_at) {
  const bool roots_stay = !session.may_offload();  // bytes_that_stay() counts roots then
  uint64_t pinned = 0;
  for (size_t i = 0; i < n; ++i) {
    const Cell* c = cell_at(i);
    bool again = c->newborn || c->long_pins > 0 || (roots_stay && c->root);
    for (size_t k = 0; k < i && !again; ++k) again = cell_at(k) == c;
    if (!again) pinned += c->nbytes;
  }
  return pinned;
}
template <class CellAt>
void note_working_set(const Session& session, size_t n, CellAt&& cell_at, Share at_once = {}) {
  note_working_set(session, bytes_beside_what_stays(session, n, cell_at), at_once);
}
// Raises the floor to this thread's last refused request. Called when the refusal is an error, with no further try.
void note_refused();
uint64_t floor_bytes();
void reset_floor();
// The most bytes that were resident after an op, since reset_floor().
extern std::atomic<uint64_t> most_resident;

// The op of this thread that found no room.
struct FailedOp {
  std::string name;         // empty: the request came from no op
  uint64_t need_bytes = 0;  // bytes that it reads and makes, or its request alone, and those that stay
  uint64_t read_bytes = 0;  // bytes of its arguments
  // Bytes of its largest result or request; of the largest tensor that it reads, where no result is known
  uint64_t result_bytes = 0;
};
FailedOp& failing_op();
FailedOp take_failed_op();  // once

}  // namespace memmgr::pager
