// A double for tests/pager/threads_stress.cpp, where no thread of the pager has the GIL.
#pragma once

namespace memmgr::pager {

struct WithoutGil {
  WithoutGil() {}
  ~WithoutGil() {}
};

}  // namespace memmgr::pager
