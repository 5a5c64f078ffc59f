#include "base/session.h"

#include <cstring>

namespace memmgr::pager {

void Session::note_tier_error(int error) {
  counters.tier_errors++;
  const Hold lock(error_lock);
  tier_error = std::strerror(error);
}

}  // namespace memmgr::pager
