// Reclaim: which cells are evicted so that a request finds room.
#pragma once

#include <cstdint>

namespace memmgr::pager {

// What the arena calls from inside malloc (rule 11): no op, no GIL. Returns the bytes that were released.
uint64_t reclaim_callback(void* user, uint64_t need, uint64_t request, int attempt);
[[noreturn]] void throw_out_of_memory(uint64_t request);

// Ways to make room that layers above own. Each is set once, before the first budget.
struct RoomSources {
  void (*memory_is_short)() = nullptr;                             // a request begins to make room
  uint64_t (*planned)(uint64_t want, uint64_t request) = nullptr;  // evicts cells that the plan lets go
  void (*plan_is_short)() = nullptr;                               // that was not enough
  uint64_t (*kept)() = nullptr;                                    // frees bytes that are kept for recipes to come
};
extern RoomSources room_sources;
}  // namespace memmgr::pager
