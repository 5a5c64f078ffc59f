#include "pools/cpu_arena.h"

#include <c10/core/CPUAllocator.h>

#include <cstring>

#include "base/checksum.h"
#include "base/forked_child.h"
#include "base/no_destructor.h"
#include "pools/scratch.h"
#include "pools/small_blocks.h"

namespace memmgr::pager {

namespace {

void free_block(void* block);

struct ArenaAllocator final : c10::Allocator {
  c10::Allocator* previous = nullptr;
  std::atomic<bool> installed{false};
  mm_arena* arena = nullptr;
  Pool* pool = nullptr;

  at::DataPtr take(void* block, uint64_t nbytes, Taking& here) const {
    here.take(nbytes);
    note_small_request(arena, nbytes);
    if (C10_UNLIKELY(here.fill >= 0)) std::memset(block, here.fill, nbytes);
    if (C10_UNLIKELY(c10::memoryProfilingEnabled())) tell_profiler(block, true);
    return {block, block, &free_block, c10::Device(c10::kCPU)};
  }

  void tell_profiler(void* block, bool allocated) const {
    const auto bytes = static_cast<int64_t>(mm_arena_block_bytes(arena, block));
    const auto live = static_cast<size_t>(mm_arena_resident(arena));
    c10::reportMemoryUsageToProfiler(block, allocated ? bytes : -bytes, live, live, c10::Device(c10::kCPU));
  }

  at::DataPtr allocate(size_t n) override {
    // Storages keep this allocator, and may grow when no budget is open.
    if (!installed.load(std::memory_order_relaxed)) return previous->allocate(n);
    if (n == 0) return {nullptr, nullptr, &free_block, c10::Device(c10::kCPU)};
    Taking& here = taking();
    void* block = mm_arena_alloc(arena, n);
    if (!block) room_maker.fail(*pool, n);
    return take(block, n, here);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t n) const override { default_copy_data(to, from, n); }
};

// never destroyed: storages keep it
NoDestructor<ArenaAllocator> the_allocator;

void free_block(void* block) {
  if (!block) return;
  const ArenaAllocator& a = *the_allocator;
  // Some of torch's libraries (oneDNN) free with the allocator that is registered at that time.
  if (C10_UNLIKELY(!mm_arena_owns(a.arena, block))) return a.previous->raw_deleter()(block);
  if (C10_UNLIKELY(c10::memoryProfilingEnabled())) a.tell_profiler(block, false);
  note_scratch_given(mm_arena_free(a.arena, block));
}

class CpuPool final : public Pool {
 public:
  CpuPool(Session& session, mm_arena* arena) : Pool(session, c10::Device(c10::kCPU), arena) {
    the_allocator->arena = arena;
    the_allocator->pool = this;
  }

  // A forked child allocates nothing in the arena.
  c10::DeleterFnPtr deleter() const override {
    return forked_child ? the_allocator->previous->raw_deleter() : &free_block;
  }
  c10::Allocator* allocator() const override { return c10::GetAllocator(c10::kCPU); }
  at::DataPtr allocate(uint64_t nbytes) override { return the_allocator->allocate(nbytes); }
  at::DataPtr try_allocate(uint64_t nbytes, uint64_t keep_free) override {
    void* block = mm_arena_try_alloc(arena, nbytes, keep_free);
    return block ? the_allocator->take(block, nbytes, taking()) : at::DataPtr();
  }

  void copy(void* to, const void* from, uint64_t nbytes) override { std::memcpy(to, from, nbytes); }
  void compare(const void* first, const void* second, uint64_t nbytes, int fill, Compared* found) override {
    pager::compare(first, second, nbytes, fill, found);
  }
  uint64_t sum(const void* p, uint64_t nbytes) override { return checksum(p, nbytes); }
  void scribble(void* p, uint64_t nbytes) override { std::memset(p, 0xCD, nbytes); }

  void install() override {
    ArenaAllocator& a = *the_allocator;
    c10::Allocator* now = c10::GetAllocator(c10::kCPU);
    if (now != &a) a.previous = now;
    a.installed = true;
    c10::SetAllocator(c10::kCPU, &a, 255);
  }
  // The allocator stays registered and forwards to the previous one: its blocks may be freed by the registered
  // allocator.
  void uninstall() override { the_allocator->installed = false; }
  // Another thread may have the arena's lock at the fork, so the arena is not used.
  void forget_in_child() override {
    ArenaAllocator& a = *the_allocator;
    if (!a.previous) return;
    c10::SetAllocator(c10::kCPU, a.previous, 255);
    a.installed = false;
  }
  const char* out_of_memory_words() const override {
    return "DefaultCPUAllocator: can't allocate memory: you tried to allocate ";
  }
};

}  // namespace

Pool* cpu_pool(Session& session) {
  static Pool* made = nullptr;
  if (made) return made;
  char why[200] = {};
  mm_arena* arena = mm_arena_create(MM_UNLIMITED, 0, why, sizeof why);
  TORCH_CHECK(arena, "memmgr: ", why, ". They take no memory, but `ulimit -v` (RLIMIT_AS) has to leave so many.");
  made = new CpuPool(session, arena);
  mm_arena_set_reclaim(arena, room_maker.reclaim, made);
  return made;
}

}  // namespace memmgr::pager
