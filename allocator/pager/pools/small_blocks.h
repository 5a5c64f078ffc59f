// Blocks that are too small for a cell. A storage below Options::small_bytes is counted and never paged, since a cell
// costs more than it frees. A program that keeps very many of them (a replay buffer) would fill the budget with bytes
// that cannot be evicted. Once they hold a share of the budget, the results of ops get cells from a page's size on.
//
// Storages from before the op stay without a cell: another thread may read them without a pin, a collective may be
// under way on them, and an address that was exported is not recorded. Foreign ops may return such a storage, so their
// results have the usual limit.
#pragma once

#include <c10/macros/Macros.h>

#include <atomic>
#include <cstdint>

#include "base/session.h"

namespace memmgr::pager {

// From this size on a result that an op has made gets a cell.
extern std::atomic<uint64_t> least_born_bytes;

// Compares the arena's small blocks with the budget.
C10_NOINLINE void look_at_small_blocks(mm_arena* arena);

// Notes a request of so many bytes.
inline void note_small_request(mm_arena* arena, uint64_t nbytes) {
  if (C10_LIKELY(nbytes < MM_SMALL_FROM || nbytes >= MM_SMALL_TO)) return;
  if (least_born_bytes.load(std::memory_order_relaxed) > MM_SMALL_FROM) look_at_small_blocks(arena);
}

}  // namespace memmgr::pager
