#include "pools/stream_rules.h"

namespace memmgr::pager {

std::atomic<bool> queues{false};

static std::atomic<uint32_t> left_out{0};

bool rule_holds(StreamRule rule) { return !(left_out.load(std::memory_order_relaxed) & rule); }
void leave_out(uint32_t rules) { left_out = rules; }

}  // namespace memmgr::pager
