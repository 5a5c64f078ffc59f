// The process's session. Entry points name it: the kernels, the launches, the module's functions. Layers below get a
// session as an argument, or from a cell's pool (tests/pager/test_layers.py).
#pragma once

#include "base/session.h"

namespace memmgr::pager {

extern Session the_session;

}  // namespace memmgr::pager
