// The CPU pool: torch's CPU allocator over the core's arena.
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <string>

#include "../budget.h"
#include "../reclaim.h"
#include "pool.h"

namespace memmgr::pager {

namespace {

thread_local int64_t tl_scratch = 0;
thread_local int64_t tl_scratch_peak = 0;

void tell_profiler(void* block, bool allocated) {
  const auto bytes = static_cast<int64_t>(mm_arena_block_bytes(budget.arena, block));
  const auto live = static_cast<size_t>(mm_arena_resident(budget.arena));
  c10::reportMemoryUsageToProfiler(block, allocated ? bytes : -bytes, live, live, c10::Device(c10::kCPU));
}

void free_others(void* block);

void free_block(void* block) {
  if (!block) return;
  // Some of torch's libraries (oneDNN) free by whatever allocator is in place then.
  if (C10_UNLIKELY(!mm_arena_owns(budget.arena, block))) return free_others(block);
  if (C10_UNLIKELY(c10::memoryProfilingEnabled())) tell_profiler(block, false);
  tl_scratch -= static_cast<int64_t>(mm_arena_block_bytes(budget.arena, block));
  mm_arena_free(budget.arena, block);
}

at::DataPtr take(void* block, uint64_t nbytes) {
  tl_scratch += static_cast<int64_t>(nbytes);
  tl_scratch_peak = std::max(tl_scratch_peak, tl_scratch);
  if (C10_UNLIKELY(c10::memoryProfilingEnabled())) tell_profiler(block, true);
  return {block, block, &free_block, c10::Device(c10::kCPU)};
}

struct ArenaAllocator final : c10::Allocator {
  c10::Allocator* previous = nullptr;
  std::atomic<bool> installed{false};

  at::DataPtr allocate(size_t n) override {
    // Storages remember this allocator, and may grow when no budget is open.
    if (!installed.load(std::memory_order_relaxed)) return previous->allocate(n);
    if (n == 0) return {nullptr, nullptr, &free_block, c10::Device(c10::kCPU)};
    void* block = mm_arena_alloc_at(budget.arena, n, tl_side);
    if (!block) throw_out_of_memory(n);
    return take(block, n);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t n) const override { default_copy_data(to, from, n); }
};

ArenaAllocator& the_allocator() {
  static auto* a = new ArenaAllocator;  // never destroyed: storages remember it
  return *a;
}

void free_others(void* block) { the_allocator().previous->raw_deleter()(block); }

}  // namespace

thread_local int tl_side = MM_SIDE_LOW;

// A forked child makes nothing in the arena.
c10::DeleterFnPtr pool_deleter() { return budget.forked ? the_allocator().previous->raw_deleter() : &free_block; }

at::DataPtr pool_allocate(uint64_t nbytes) { return the_allocator().allocate(nbytes); }

at::DataPtr pool_try_allocate(uint64_t nbytes, uint64_t keep_free) {
  void* block = mm_arena_try_alloc(budget.arena, nbytes, keep_free);
  return block ? take(block, nbytes) : at::DataPtr();
}

void install_pool(uint64_t budget_bytes) {
  if (!budget.arena) {
    char why[200] = {};
    budget.arena = mm_arena_create(MM_UNLIMITED, 0, why, sizeof why);
    TORCH_CHECK(budget.arena, "memmgr: no address range for the arena: ", why);
    mm_arena_set_reclaim(budget.arena, &reclaim_callback, nullptr);
  }
  ArenaAllocator& a = the_allocator();
  c10::Allocator* now = c10::GetAllocator(c10::kCPU);
  if (now != &a) a.previous = now;
  mm_arena_set_layout(budget.arena, budget.options.remap, budget.options.apart);
  mm_arena_set_budget(budget.arena, budget_bytes);
  a.installed = true;
  c10::SetAllocator(c10::kCPU, &a, 255);
}

void uninstall_pool() {
  ArenaAllocator& a = the_allocator();
  if (!a.installed) return;
  mm_arena_set_budget(budget.arena, MM_UNLIMITED);
  mm_arena_set_layout(budget.arena, MM_REMAP_FIRST, 0);
  a.installed = false;  // it stays in place, and hands on: what it gave may be freed by asking for the allocator again
}

// The arena's lock may be another thread's at the fork: it is left alone.
void forget_pool_in_child() {
  ArenaAllocator& a = the_allocator();
  if (!a.previous) return;
  c10::SetAllocator(c10::kCPU, a.previous, 255);
  a.installed = false;
}

void begin_scratch() { tl_scratch = tl_scratch_peak = 0; }
uint64_t scratch_now() { return static_cast<uint64_t>(std::max<int64_t>(0, tl_scratch)); }
uint64_t scratch_peak() { return static_cast<uint64_t>(tl_scratch_peak); }

}  // namespace memmgr::pager
