#include "pools/capturing.h"

#include "pools/pool.h"
#include "pools/stream_rules.h"

namespace memmgr::pager {

std::atomic<int> captures{0};

bool is_capturing(const Pool& pool) {
  mm_device* device = captures.load() > 0 && queues ? pool.queue() : nullptr;
  return device && mm_device_is_capturing(device, pool.stream()) > 0;
}

}  // namespace memmgr::pager
