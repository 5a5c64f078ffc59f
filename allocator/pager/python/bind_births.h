// Functions for reports on the holders of memory: living cells, those of the peak, source lines.
#pragma once

#include "python/bind.h"

namespace memmgr::pager {

void bind_births(Module& m);

}  // namespace memmgr::pager
