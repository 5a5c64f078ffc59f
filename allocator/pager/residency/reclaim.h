// Reclaim: evicts cells so that a request finds room.
#pragma once

#include <cstdint>

namespace memmgr::pager {

class Pool;
struct Session;

// Called by the arena inside malloc (rule 11): runs no op, takes no GIL. Returns the bytes released.
uint64_t reclaim_callback(void* user, uint64_t need, uint64_t request, int attempt);
__attribute__((noreturn)) void throw_out_of_memory(Pool& pool, uint64_t request);

// Ways to make room that higher layers own. Each is set once, before the first budget.
struct RoomSources {
  void (*memory_is_short)() = nullptr;  // a request begins to reclaim
  uint64_t (*planned)(const Session& session, uint64_t want,
                      uint64_t request) = nullptr;  // evicts cells that the plan has released
  void (*plan_is_short)() = nullptr;                // called if that was not enough
  uint64_t (*kept)() = nullptr;                     // frees bytes that are kept for later recipes
};
extern RoomSources room_sources;
}  // namespace memmgr::pager
