// The functions for the pool and the tier.
#pragma once

#include "python/bind.h"

namespace memmgr::pager {

void bind_pool(Module& m);

}  // namespace memmgr::pager
