#include "base/wait.h"

#include <algorithm>

#include "base/clock.h"

namespace memmgr::pager {

static thread_local uint64_t tl_waited_ns = 0;

const uint64_t& waited_ns() { return tl_waited_ns; }
Wait::Wait() : begun_(now_ns()), before_(tl_waited_ns) {}
uint64_t Wait::end() {
  const uint64_t all = now_ns() - begun_, inner = tl_waited_ns - before_;
  tl_waited_ns = before_ + all;
  return all - std::min(all, inner);
}

}  // namespace memmgr::pager
