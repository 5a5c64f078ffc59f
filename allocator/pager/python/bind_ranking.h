#pragma once

#include "python/bind.h"

namespace memmgr::pager {

void bind_ranking(Module& m);

}  // namespace memmgr::pager
