// A double for tests/pager/threads_stress.cpp: the one figure of the cells that admission reads.
#pragma once

#include <c10/macros/Macros.h>

#include "base/session.h"

namespace memmgr::pager {

struct Totals {
  SumUnderLock resident_cell_bytes;
};
extern Totals totals;

}  // namespace memmgr::pager
