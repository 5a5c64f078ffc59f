// Cells whose bytes are used in stream order (docs/internals/streams.md).
#pragma once

#include "cell.h"
#include "pools/pool.h"

namespace memmgr::pager {

// Has more than one stream been used since the budget opened? Then absent cells have a null pointer and no trap: where
// streams differ, autograd's engine asks a gradient for its address outside of any op, to tell the allocator. A read
// behind our back faults then, where it would be an error.
bool several_streams();
void note_stream();  // the calling thread's
void forget_streams();

// The cell has other bytes: in whose order their block was allocated. The caller has it busy.
void note_home(Cell* c);

void use_queued(Cell* c);
// What this thread queues from now on may use the bytes. The caller has a pin, and they are there.
inline void use_here(Cell* c) {
  if (C10_UNLIKELY(queues)) use_queued(c);
}

}  // namespace memmgr::pager
