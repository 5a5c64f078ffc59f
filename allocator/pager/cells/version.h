// Versions: what a cell held, which recipes need it, and how it ends.
#pragma once

#include "base/events.h"
#include "cells/cell.h"
#include "cells/types.h"

namespace memmgr::pager {

void release_version_locked(Version* v, Trash* trash);
void release_recipe_locked(Recipe* r, Trash* trash);
bool has_bytes_locked(const Version* v);
// Can its bytes be had: are they somewhere, or can its recipe make them?
bool available_locked(const Version* v);
// Called whenever bytes or a recipe have gone: tells whoever could be made from `v` that they cannot any more.
void check_lost_locked(Version* v);
// A ghost has bytes for a while, as an orphan that may be offloaded; and has none again.
void lend_bytes_locked(Version* v, at::DataPtr bytes);
void end_loan_locked(Version* v, Trash* trash);
void need_locked(Version* v);
void unneed_locked(Version* v, Trash* trash);
// The cell's bytes are gone, or back: what its recipe reads is needed, or not any more.
void set_evicted_locked(Version* v, bool evicted, Trash* trash);
// The cell has new bytes from here on, of unknown making. The old version becomes a ghost; whoever needs it has been
// given its bytes before (see settle_before_write).
Version* new_version_locked(Cell* c, Trash* trash);
// Before the bytes of `c` change: what is needed of them is kept as an orphan's copy (rule 4). Allocates; no lock held.
void settle_before_write(Cell* c);
// Both, so that nobody comes to need the old bytes in between; and the copy below is void.
void begin_new_version(Cell* c);
// The copy below is not true to the bytes any more.
void drop_slot(Cell* c);
void forget_recipe_locked(Version* v, Trash* trash);

// `made_by`: of the bytes that the event is about; null: not known. The graph's lock is held, or the recipe is the
// caller's.
inline void note_event(Event what, const Recipe* made_by, uint64_t bytes, uint64_t ns) {
  if (C10_UNLIKELY(watched.load(std::memory_order_relaxed)))
    add_event(what, made_by ? made_by->info : nullptr, made_by ? made_by->module : 0, bytes, ns);
}

// True if the version is needed, or evicted, and its bytes are nowhere: it needs what its recipe reads.
bool pulls_locked(const Version* v);
inline bool recipe_available_locked(const Recipe* r) { return !r->broken; }
void need_inputs_locked(Recipe* r);
void unneed_inputs_locked(Recipe* r, Trash* trash);
void forget_output_locked(Recipe* r, const Version* v);
// The version was in the cell that the timeline has met so: a plan names it by that.
inline void note_ghost_locked(Version* v, const Cell* c) {
  v->period = c->period;
  v->ordinal = c->ordinal;
}

}  // namespace memmgr::pager
