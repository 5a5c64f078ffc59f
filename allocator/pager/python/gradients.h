// Gradients that another thread may be replacing. Backward replaces a parameter's .grad without the GIL. `p.grad =
// None` replaces it in two steps with the GIL free between them, so that at some moments it names a tensor that has
// ended.
#pragma once

#include "python/bind.h"

namespace memmgr::pager {

void bind_gradients(Module& m);

}  // namespace memmgr::pager
