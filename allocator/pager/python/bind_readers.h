// Functions for Python's readers of raw bytes.
#pragma once

#include "python/bind.h"

namespace memmgr::pager {

void bind_readers(Module& m);

}  // namespace memmgr::pager
