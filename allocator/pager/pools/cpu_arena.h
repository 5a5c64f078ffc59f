// The CPU pool: torch's CPU allocator over the core's arena.
#pragma once

#include "pools/pool.h"

namespace memmgr::pager {

Pool* cpu_pool(Session& session);

}  // namespace memmgr::pager
