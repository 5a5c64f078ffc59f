// Cells whose bytes are used in stream order (docs/internals/streams.md).
#pragma once

#include "cell.h"
#include "pools/pool.h"

namespace memmgr::pager {

void use_queued(Cell* c);
// What this thread queues from now on may use the bytes. The caller has a pin, and they are there.
inline void use_here(Cell* c) {
  if (C10_UNLIKELY(queues)) use_queued(c);
}

}  // namespace memmgr::pager
