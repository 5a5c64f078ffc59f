#include "pools/small_blocks.h"

#include <algorithm>

namespace memmgr::pager {

namespace {

constexpr uint64_t kShareOfBudget = 16;

}  // namespace

std::atomic<uint64_t> least_born_bytes{Options().small_bytes};
std::atomic<int64_t> small_block_bytes{0};

void look_at_small_blocks() {
  const uint64_t limit = mm_arena_budget(budget.arena);
  if (limit >= MM_UNLIMITED) return;
  if (small_block_bytes.load(std::memory_order_relaxed) > static_cast<int64_t>(limit / kShareOfBudget))
    least_born_bytes.store(std::min(budget.options.small_bytes, kLeastCell), std::memory_order_relaxed);
}

}  // namespace memmgr::pager
