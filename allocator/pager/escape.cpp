#include "escape.h"

#include "budget.h"
#include "reclaim.h"
#include "threads.h"

namespace memmgr::pager {

void escape(Cell* c, Escape why) {
  pin(c, ticks());
  try {
    bring_back(c);
    begin_new_version(c);  // whoever has the address may write there at any time
  } catch (...) {
    unpin(c);
    throw;
  }
  {
    std::lock_guard<std::mutex> lock(graph_lock());
    if (c->escape == Escape::kNone) {
      c->escape = why;
      stand_pinned_locked(c);
      escaped_bytes += c->nbytes;
      counters.escapes++;
    }
  }
  unpin(c);
}

void foreign_write(c10::StorageImpl* s) {
  Cell* c = cell_of(s);
  // An op, a scoped reader or a region has it pinned, and has said what it writes; what escaped is written to at will.
  if (!c || !budget.open.load() || tl_depth > 0 || (c->state.load() & kPinMask)) return;
  counters.foreign_writes++;
  escape(c, Escape::kForeignWrite);
}

}  // namespace memmgr::pager
