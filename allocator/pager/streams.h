// Cells whose bytes are used in stream order.
#pragma once

#include "cell.h"
#include "pools/pool.h"

namespace memmgr::pager {

// Absent cells have a null pointer and no trap while somebody asks for addresses outside of any op and reads nothing:
// autograd's engine, where more than one stream has been used since the budget opened, to tell the allocator of a
// gradient; and profilers, which note them. A read behind our back faults then, where it would be an error.
bool without_trap();
void note_stream();  // the calling thread's: before it queues anything
bool several_streams();
void note_profiler(bool on);
void forget_askers();  // when a budget opens

// The cell has other bytes: in whose order their block was allocated. The caller has it busy.
void note_queued_home(Cell* c);
inline void note_home(Cell* c) {
  if (C10_UNLIKELY(!c->pool->on_host())) note_queued_home(c);
}

void use_queued(Cell* c);
// What this thread queues from now on may use the bytes. The caller has a pin, and they are there.
inline void use_here(Cell* c) {
  if (C10_UNLIKELY(queues)) use_queued(c);
}

}  // namespace memmgr::pager
