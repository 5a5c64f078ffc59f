// Names: the numbers that code which only compares addresses gets instead of them (rule 9).
//
// A storage has one name as long as it keeps its memory: before `import memmgr`, in budgets, between and after them.
// The name is the address at which the storage was when its bytes moved for the first time. So the name is the address
// wherever nothing has moved, and an answer of plain torch's agrees with it.
//
//   claim   the name of a storage whose bytes lie, or may come to lie, somewhere else. A cell claims its address when
//   it
//           first leaves; the claim ends with the storage, as an address does
//   number  the name of a storage whose own address is part of another storage's claim. Numbers come from a range that
//           is never mapped, and none is given twice
//
// Invariants, under the graph's lock:
//   - Claims do not overlap, and an absent cell has one.
//   - A storage without a claim is named by its address, and that is part of no claim from its first answer on: what is
//     claimed later was the address of another storage, or a number.
//   - Two storages over the same memory have the same name. Their memory does not move while both live, because it has
//     escaped or is not managed, so its place is on record where it has a claim.
#pragma once

#include "cells/types.h"

namespace memmgr::pager {

// The storage's name; 0: it has no cell, and its own address is its name. Takes the lock.
uint64_t name_of(c10::StorageImpl* s);
// Whether a living storage has another name than its address. Takes the lock.
bool names_differ();

// The bytes of `c` are about to leave.
void claim_name_locked(Cell* c);
inline void name_leaving_locked(Cell* c) {
  if (!c->name) claim_name_locked(c);
}
// The address of `c` has been handed out: other storages may be made over its bytes.
void name_escaped_locked(Cell* c);
// The storage is a cell now, and may have been one in an earlier budget.
void name_adopted_locked(Cell* c, const c10::StorageImpl* s);
// The storage has no cell any more.
void name_unadopted_locked(Cell* c, c10::StorageImpl* s);
// The storage has died.
void end_name_locked(Cell* c);

}  // namespace memmgr::pager
