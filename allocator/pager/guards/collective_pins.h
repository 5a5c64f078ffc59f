// Cells that an asynchronous op may still be using stay pinned until its Work is done or nobody has it (rule 3).
#pragma once

#include "cells/types.h"

namespace memmgr::pager {

// `pinned` are released with the Work.
void keep_until_done(const c10::intrusive_ptr<c10::intrusive_ptr_target>& work, std::vector<Cell*> pinned);
void poll_works();
void forget_works();  // at the end of a budget: nothing leaves any more
size_t works_in_flight();

}  // namespace memmgr::pager
