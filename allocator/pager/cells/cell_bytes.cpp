#include "cells/cell_bytes.h"

#include "cells/copies.h"
#include "cells/mapped_range.h"
#include "cells/names.h"
#include "cells/pointer_trap.h"
#include "pools/pool.h"

namespace memmgr::pager {

void forget_bytes_locked(Cell* c, Trash* trash) {
  const bool absent = c->state.load() & kAbsent;
  if (absent) {
    end_bits_locked(c);
    mm_arena_note_virtual(c->pool->arena, -static_cast<int64_t>(c->nbytes));
    totals.absent_cells--;
  } else {
    if (!c->small) totals.resident_cell_bytes -= c->nbytes;
    if (c->outside) mm_arena_add_outside(c->pool->arena, -static_cast<int64_t>(c->nbytes));
  }
  if (C10_UNLIKELY(c->range != nullptr)) {
    c->range->clean = has_file_copy(c) && in_mapping(c);
    if (in_mapping(c)) c->range->home = std::move(c->bytes);
    trash->ranges.push_back(end_range_locked(c));
  }
  trash->bytes.push_back(std::move(c->bytes));
  c->bytes.clear();
  cancel_write_locked(c, trash);
  if (c->slot >= 0) trash->add_slot(c, c->slot);
  c->slot = -1;
  if (c->kept) totals.recipe_bytes -= c->nbytes;
}

at::DataPtr become_absent_locked(Cell* c, c10::StorageImpl* s) {
  if (s) {
    name_leaving_locked(c);
    show_bytes(s, nullptr, c);
  }
  at::DataPtr bytes;
  if (C10_UNLIKELY(in_mapping(c)))
    c->range->home = std::move(c->bytes);
  else
    bytes = std::move(c->bytes);
  c->bytes.clear();
  totals.resident_cell_bytes -= c->nbytes;
  if (c->outside) mm_arena_add_outside(c->pool->arena, -static_cast<int64_t>(c->nbytes));
  c->outside = false;
  mm_arena_note_virtual(c->pool->arena, static_cast<int64_t>(c->nbytes));
  totals.absent_cells++;
  return bytes;
}

}  // namespace memmgr::pager
