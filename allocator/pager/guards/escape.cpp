#include "guards/escape.h"

#include <ATen/Parallel.h>

#include "base/clock.h"
#include "base/lock.h"
#include "base/session.h"
#include "base/thread_state.h"
#include "cells/cell.h"
#include "cells/lifetime.h"
#include "cells/pointer_trap.h"
#include "cells/version.h"
#include "concurrency/deferred_steps.h"
#include "pools/pool.h"
#include "residency/checksums.h"
#include "residency/restore.h"

namespace memmgr::pager {

void escape(Cell* c, Escape why) {
  Session& session = c->pool->session;
  pin(c, ticks());
  try {
    restore_cell(c);
    if (c->filled_on != kNotFilled) {  // a reader of the address waits for no stream
      c->pool->settle();
      c->filled_on = kNotFilled;
      end_comparisons_that_are_there();
    }
    settle_late_slices(session);
    begin_new_version(c);  // a holder of the address may write there at any time
  } catch (...) {
    unpin(c);
    throw;
  }
  {
    const Hold lock(graph_lock());
    if (c->escape == Escape::kNone)
      escape_locked(c, why);
    else if (outlives_budget(why))  // the reason so far may end before the storage
      c->escape = why;
  }
  unpin(c);
}

void foreign_write(c10::StorageImpl* s) {
  Cell* c = cell_of(s);
  if (!c || !c->pool->session.open.load() || c->newborn || c->escape != Escape::kNone) return;
  const bool called = tl_depth > 0 || tl_readers > 0 || tl_regions > 0;
  if (c->state.load() & kPinMask) {
    // If this thread is in an op, a reader or a region, the pin counts as theirs, and their writes are declared. A
    // thread that runs a part of another thread's op does not write unseen either. In all other cases the pin belongs
    // to another thread, and the write is foreign.
    if (called || at::in_parallel_region() || is_backends_thread()) return;
  } else if (called && !tl_foreign) {
    return;
  }
  Session& session = c->pool->session;
  finish_pending_of(session, s);
  session.counters.foreign_writes++;
  escape(c, Escape::kForeignWrite);
}

static const bool sees_writes = (on_foreign_write = &foreign_write, true);

}  // namespace memmgr::pager
