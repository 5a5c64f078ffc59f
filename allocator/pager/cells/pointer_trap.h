// The trap of absent bytes (rule 2), and how writes that no op announces are told.
#pragma once

#include "cells/types.h"

namespace memmgr::pager {

// Shows the storage where its bytes are, with the trap off; null: nowhere, with the trap on (rule 2). Whoever calls
// this has the cell busy.
void show_bytes(c10::StorageImpl* s, void* data, const Cell* c);
// A write that no op announces is told from here on (2.13's materializer; before that there is none). The caller has a
// pin.
void watch_writes(const Cell* c);
void unwatch_writes(c10::StorageImpl* s);
// What such a write calls (guards/escape.h).
extern void (*on_foreign_write)(c10::StorageImpl* s);
// The id in a trap's message, 0 if the text is no trap's.
uint64_t trapped_cell(const char* what);

// Absent cells have a null pointer and no trap while some thread asks for addresses outside of any op and reads
// nothing: autograd's engine, where more than one stream has been used since the budget opened, to tell the allocator
// of a gradient; and profilers, which note them. A read that no op announces faults then, where it would be an error.
extern std::atomic<bool> without_trap;

}  // namespace memmgr::pager
