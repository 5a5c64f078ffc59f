// Figures, and functions for tests.
#pragma once

#include "python/bind.h"

namespace memmgr::pager {

void bind_figures(Module& m);

}  // namespace memmgr::pager
