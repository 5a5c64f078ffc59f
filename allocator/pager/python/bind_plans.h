#pragma once

#include "python/bind.h"

namespace memmgr::pager {

void bind_plans(Module& m);
// Called when a budget ends.
void forget_periods();

}  // namespace memmgr::pager
