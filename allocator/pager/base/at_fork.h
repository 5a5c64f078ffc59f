// Mutexes that a fork takes first, so that a child finds them free and the data that they guard whole.
#pragma once

#include <mutex>
#include <vector>

namespace memmgr::pager {

// The fork takes this mutex. A thread that has it never waits for the GIL, which the forking thread has.
std::mutex& taken_by_forks(std::mutex* made);

struct ForkLocks {
  std::mutex lock;
  std::vector<std::mutex*> all;
};
ForkLocks& fork_locks();

}  // namespace memmgr::pager
