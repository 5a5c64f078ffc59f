// A double for tests/pager/threads_stress.cpp, which says itself which of its threads sleep.
#pragma once

#include <cstdint>

namespace memmgr::pager {

struct Sleeper {
  unsigned long system_thread;
  uint64_t looked_ns = 0, ran_ns = 0;
};
bool rests(Sleeper* thread, uint64_t now, uint64_t long_ns);

}  // namespace memmgr::pager
