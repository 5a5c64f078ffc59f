#include "pools/small_blocks.h"

namespace memmgr::pager {

namespace {

constexpr uint64_t kShareOfBudget = 16;

}  // namespace

std::atomic<uint64_t> least_born_bytes{Options().small_bytes};

void look_at_small_blocks(mm_arena* arena) {
  const uint64_t limit = mm_arena_budget(arena);
  if (limit < MM_UNLIMITED && mm_arena_small_bytes(arena) > limit / kShareOfBudget)
    least_born_bytes.store(MM_SMALL_FROM, std::memory_order_relaxed);
}

}  // namespace memmgr::pager
