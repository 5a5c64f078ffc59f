// Blocks that are too small for a cell. A storage below Options::small_bytes is counted and never paged, since a cell
// costs more than it frees. A program that keeps very many of them (a replay buffer) would fill the budget with bytes
// that cannot be evicted. Once they hold a share of the budget, storages that ops make get cells from a page's size on.
//
// Older storages stay without a cell: an op of another thread may read them without a pin, and an address that was
// exported is not recorded.
#pragma once

#include <c10/macros/Macros.h>

#include <atomic>
#include <cstdint>

#include "base/budget.h"
#include "pools/scratch.h"

namespace memmgr::pager {

constexpr uint64_t kLeastCell = 4096;         // a page of the host
constexpr uint64_t kLargestSmall = 64 << 10;  // blocks from here on are not counted

// From this size on a storage that an op makes gets a cell.
extern std::atomic<uint64_t> least_born_bytes;
extern std::atomic<int64_t> small_block_bytes;  // of all live blocks in between

// Compares the bytes with the budget.
void look_at_small_blocks();

inline bool is_small_block(uint64_t nbytes) { return nbytes >= kLeastCell && nbytes < kLargestSmall; }

// Notes a block that the pool has given out. `nbytes`: as asked for.
inline void note_block_taken(uint64_t nbytes) {
  const uint64_t unit = nbytes <= 8192 ? 64 : MM_UNIT;  // as the arena rounds
  const uint64_t bytes = (nbytes + unit - 1) / unit * unit;
  if (C10_LIKELY(!is_small_block(bytes))) return;
  small_block_bytes.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
  if (least_born_bytes.load(std::memory_order_relaxed) > kLeastCell) look_at_small_blocks();
}

// Notes a block that this thread has freed, of so many bytes.
inline void note_given(uint64_t bytes) {
  note_scratch_given(bytes);
  if (is_small_block(bytes)) small_block_bytes.fetch_sub(static_cast<int64_t>(bytes), std::memory_order_relaxed);
}

}  // namespace memmgr::pager
