// The trap of absent bytes (rule 2), and reports of writes that no op declares.
#pragma once

#include "cells/types.h"

namespace memmgr::pager {

// Sets the storage's pointer to `data` and takes the trap off. Null: the pointer is null and the trap is set (rule 2).
// The caller has the cell busy.
void show_bytes(c10::StorageImpl* s, void* data, const Cell* c);
// Reports a write that no op declares, until unwatch_writes (by torch 2.13's materializer; earlier releases have none).
// The caller has a pin.
void watch_writes(const Cell* c) NOT_ANALYZED;  // its storage stays: the caller has the cell pinned
void unwatch_writes(c10::StorageImpl* s);
// Called by such a write (guards/escape.h).
extern void (*on_foreign_write)(c10::StorageImpl* s);
// Returns the id in a trap's message; 0: the text is not from a trap.
uint64_t trapped_cell(const char* what);

// Absent cells have a null pointer and no trap while a thread takes addresses outside of ops and reads no bytes. These
// threads are autograd's engine, which records the streams of gradients with the allocator once more than one stream
// has been used since the budget opened, and profilers, which record addresses. A read that no op declares then faults
// instead of raising an error.
extern std::atomic<bool> without_trap;

}  // namespace memmgr::pager
