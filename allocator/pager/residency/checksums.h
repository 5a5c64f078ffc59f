// Checksums of bytes that left, compared when they are back (rule 8).
#pragma once

#include "cells/types.h"

namespace memmgr::pager {

// Throws if the bytes are not those that left, where a checksum was kept. The caller has the cell busy.
void check_sum(Cell* c, const void* data);
bool sum_agrees(Cell* c, const void* data);

}  // namespace memmgr::pager
