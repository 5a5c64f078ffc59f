#include "pools/capturing.h"

#include "base/session.h"
#include "pools/pool.h"
#include "pools/stream_rules.h"

namespace memmgr::pager {

std::atomic<int> captures{0};

bool is_capturing() {
  mm_device* device = captures.load() > 0 && queues ? the_session.pool->queue() : nullptr;
  return device && mm_device_is_capturing(device, the_session.pool->stream()) > 0;
}

}  // namespace memmgr::pager
