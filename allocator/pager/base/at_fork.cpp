#include "base/at_fork.h"

namespace memmgr::pager {

ForkLocks& fork_locks() {
  static auto* locks = new ForkLocks;
  return *locks;
}

std::mutex& taken_by_forks(std::mutex* made) {
  std::lock_guard<std::mutex> lock(fork_locks().lock);
  fork_locks().all.push_back(made);
  return *made;
}

}  // namespace memmgr::pager
