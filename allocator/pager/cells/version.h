// Versions: the bytes of a cell between two writes, the recipes that need them, and their end.
#pragma once

#include "base/events.h"
#include "cells/cell.h"
#include "cells/types.h"

namespace memmgr::pager {

void release_version_locked(Version* v, Trash* trash) REQUIRES(graph_lock());
void release_recipe_locked(Recipe* r, Trash* trash) REQUIRES(graph_lock());
bool has_bytes_locked(const Version* v) REQUIRES(graph_lock());
// Returns true if the bytes can be had: they are somewhere, or the recipe can make them.
bool available_locked(const Version* v) REQUIRES(graph_lock());
// Called whenever bytes or a recipe have ended. Marks recipes that need `v` as broken if its bytes cannot be had any
// longer.
void check_lost_locked(Version* v) REQUIRES(graph_lock());
// Gives a ghost bytes for a while, as an orphan that may be offloaded. end_loan_locked frees them. `pool`:
// the bytes' own.
void lend_bytes_locked(Pool& pool, Version* v, at::DataPtr bytes) REQUIRES(graph_lock());
void end_loan_locked(Version* v, Trash* trash) REQUIRES(graph_lock());
void need_locked(Version* v) REQUIRES(graph_lock());
void unneed_locked(Version* v, Trash* trash) REQUIRES(graph_lock());
// Records that the cell is evicted, or restored: its recipe's inputs are needed, or no longer.
void set_evicted_locked(Version* v, bool evicted, Trash* trash) REQUIRES(graph_lock());
// Gives the cell a new version without a recipe. The old version becomes a ghost. A recipe that needs it has its bytes
// already (see settle_before_write).
Version* new_version_locked(Cell* c, Trash* trash) REQUIRES(graph_lock());
// Called before the bytes of `c` change. Keeps the old bytes in an orphan if recipes need them (rule 4). Allocates; no
// lock is held.
void settle_before_write(Cell* c);
// Does both, so that no recipe begins to need the old bytes in between. Frees the copy in the tier.
void begin_new_version(Cell* c);
// Frees the copy in the tier, which no longer has the current bytes.
void drop_slot(Cell* c);
void forget_recipe_locked(Version* v, Trash* trash) REQUIRES(graph_lock());

// `made_by`: the recipe of the event's bytes; null: not known. The caller holds the graph's lock, or has the recipe.
inline void note_event(Event what, const Recipe* made_by, uint64_t bytes, uint64_t ns) {
  if (C10_UNLIKELY(watched.load(std::memory_order_relaxed)))
    add_event(what, made_by ? made_by->info : nullptr, made_by ? made_by->module : 0, bytes, ns);
}

// True if the version is needed, or evicted, and has no bytes: it needs the inputs of its recipe.
bool pulls_locked(const Version* v) REQUIRES(graph_lock());
inline bool recipe_available_locked(const Recipe* r) REQUIRES(graph_lock()) { return !r->broken; }
void need_inputs_locked(Recipe* r) REQUIRES(graph_lock());
void unneed_inputs_locked(Recipe* r, Trash* trash) REQUIRES(graph_lock());
void forget_output_locked(Recipe* r, const Version* v) REQUIRES(graph_lock());
// Records the ordinal that the cell had in the timeline: a plan names the version by it.
inline void note_ghost_locked(Version* v, const Cell* c) REQUIRES(graph_lock()) {
  v->period = c->period;
  v->ordinal = c->ordinal;
}

}  // namespace memmgr::pager
