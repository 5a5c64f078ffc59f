// Cells that an asynchronous op may still use stay pinned until its Work is done or has no owner (rule 3).
#pragma once

#include "cells/types.h"

namespace memmgr::pager {

// Ends the pins of `pinned` when the Work ends.
void keep_until_done(const c10::intrusive_ptr<c10::intrusive_ptr_target>& work, std::vector<Cell*> pinned);
void poll_works();
void forget_works();  // at the end of a budget, after which no cell is evicted
size_t works_in_flight();

}  // namespace memmgr::pager
