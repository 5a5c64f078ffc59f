// Pool: where managed memory comes from. It keeps the budget in its malloc and asks reclaim() before it would pass it.
// One pool a process at a time; today the CPU's arena.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>

namespace memmgr::pager {

// What marks a DataPtr as the pool's.
c10::DeleterFnPtr pool_deleter();
// Throws c10::OutOfMemoryError when nothing more can be let go.
at::DataPtr pool_allocate(uint64_t nbytes);
// Never reclaims, leaves `keep_free` bytes of the budget; empty: no room.
at::DataPtr pool_try_allocate(uint64_t nbytes, uint64_t keep_free);

// On which side this thread's large blocks lie, where sides differ (MM_SIDE_*).
extern thread_local int tl_side;

void install_pool(uint64_t budget_bytes);
void uninstall_pool();
void forget_pool_in_child();

// What this thread's allocations came to since `begin_scratch`: their high-water mark.
void begin_scratch();
uint64_t scratch_now();  // of it, what is there still
uint64_t scratch_peak();

}  // namespace memmgr::pager
