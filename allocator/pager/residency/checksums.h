// Checksums of evicted cells, compared when the cells are restored (rule 8).
#pragma once

#include "cells/types.h"

namespace memmgr::pager {

// Throws if a checksum was kept and the bytes do not match it. The caller has the cell busy.
void check_sum(Cell* c, const void* data);
bool sum_agrees(Cell* c, const void* data);

}  // namespace memmgr::pager
