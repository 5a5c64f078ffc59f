// Room that is kept for memory of other allocators.
#pragma once

#include "memmgr/core.h"

namespace memmgr::pager {

// While it lives no allocation gets this room. Its owner counts the memory as outside before it ends.
class Promised {
 public:
  Promised(mm_arena* arena, uint64_t nbytes) : arena_(arena), nbytes_(static_cast<int64_t>(nbytes)) {
    mm_arena_promise_outside(arena_, nbytes_);
  }
  ~Promised() { mm_arena_promise_outside(arena_, -nbytes_); }
  Promised(const Promised&) = delete;
  Promised& operator=(const Promised&) = delete;

 private:
  mm_arena* arena_;
  int64_t nbytes_;
};

}  // namespace memmgr::pager
