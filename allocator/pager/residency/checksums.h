// Checksums of evicted cells, compared when the cells are restored (rule 8).
//
// An accelerator computes the checksum of restored bytes after the work that is queued before it, and the program does
// not wait for it: the comparison is made once both checksums are there. With verify=True it is waited for.
#pragma once

#include <c10/macros/Macros.h>

#include <atomic>

#include "cells/types.h"

namespace memmgr::pager {

// Throws WrongBytes if a checksum was kept and the bytes do not match it. The caller has the cell busy.
void check_sum(Cell* c, const void* data);
bool sum_agrees(Cell* c, const void* data);  // false instead

// For bytes that become the cell's: these may only begin a comparison, and agree until it has been made.
void check_restored(Cell* c, const void* data);
bool restored_sum_agrees(Cell* c, const void* data);

// Comparisons that have begun.
extern std::atomic<uint32_t> comparisons;
// Makes the comparisons whose checksums are there, or waits for all of them. Throws WrongBytes if bytes differ. No lock
// is held.
void end_comparisons(bool all);
inline void end_comparisons_that_are_there() {
  if (C10_UNLIKELY(comparisons.load(std::memory_order_relaxed) > 0)) end_comparisons(false);
}
// Forgets them: in a forked child, and before the device's memory ends.
void forget_comparisons();

}  // namespace memmgr::pager
