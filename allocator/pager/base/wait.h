// Time that a thread has waited.
#pragma once

#include <cstdint>

namespace memmgr::pager {

// Nanoseconds that this thread has waited for room, or for a restore, each counted once. The reference goes on
// counting.
const uint64_t& waited_ns();
class Wait {
 public:
  Wait();
  // Returns the part of the wait that no inner wait has counted.
  uint64_t end();

 private:
  uint64_t begun_, before_;
};

}  // namespace memmgr::pager
