// Time that a thread has waited.
#pragma once

#include <cstdint>

namespace memmgr::pager {

// Nanoseconds that this thread has waited for room, or for bytes to be back, each counted once. They go on counting.
const uint64_t& waited_ns();
class Wait {
 public:
  Wait();
  // The part of it that no inner wait has counted.
  uint64_t end();

 private:
  uint64_t begun_, before_;
};

}  // namespace memmgr::pager
