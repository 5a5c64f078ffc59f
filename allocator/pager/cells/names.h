// Names: numbers that replace addresses in code that only compares them (rule 9).
//
// A storage has one name as long as it keeps its memory: before `import memmgr`, in budgets, between and after them.
// The name is the storage's address before its bytes moved for the first time. So the name is the address wherever no
// bytes have moved, and it agrees with an answer of plain torch.
//
//   claim   the name of a storage whose bytes are, or may come to be, at another address. A cell claims its address
//           when it is first evicted; the claim ends with the storage, as an address does
//   number  the name of a storage whose own address is part of another storage's claim. Numbers come from a range
//           that is never mapped, and none is given twice
//
// Invariants, under the graph's lock:
//   - Claims do not overlap, and an absent cell has one.
//   - A storage without a claim is named by its address. From the first answer on that address is part of no claim: a
//     later claim is for the address of another storage, or for a number.
//   - Two storages over the same memory have the same name. Their memory does not move while both live, because it has
//     escaped or is not managed, so its place is recorded if it has a claim.
#pragma once

#include "cells/types.h"

namespace memmgr::pager {

// Returns the storage's name; 0: it has no cell, and its own address is its name. Takes the lock.
uint64_t name_of(c10::StorageImpl* s);
// Returns true if a living storage has another name than its address. Takes the lock.
bool names_differ();

// Called before the bytes of `c` become absent.
void claim_name_locked(Cell* c) REQUIRES(graph_lock());
inline void name_leaving_locked(Cell* c) REQUIRES(graph_lock()) {
  if (!c->name) claim_name_locked(c);
}
// Called when the bytes came from another allocator's memory at this address.
void name_moved_locked(Cell* c, uint64_t from) REQUIRES(graph_lock());
// Called when the address of `c` is handed out: other storages may be made over its bytes.
void name_escaped_locked(Cell* c) REQUIRES(graph_lock());
// Called when the storage becomes a cell. It may have been one in an earlier budget.
void name_adopted_locked(Cell* c, const c10::StorageImpl* s) REQUIRES(graph_lock());
// Called when the storage has no cell any longer.
void name_unadopted_locked(Cell* c, c10::StorageImpl* s) REQUIRES(graph_lock());
// Called when the storage has ended.
void end_name_locked(Cell* c) REQUIRES(graph_lock());

}  // namespace memmgr::pager
