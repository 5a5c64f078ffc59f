// MEMMGR_DEBUG=1: the pager checks itself.
#pragma once

#include <cstdlib>
#include <cstring>

namespace memmgr::pager {

inline bool is_debugging() {
  const char* debug = std::getenv("MEMMGR_DEBUG");
  return debug && std::strcmp(debug, "1") == 0;
}

}  // namespace memmgr::pager
