#include "base/budget.h"

#include <cstring>

namespace memmgr::pager {

Budget budget;
Counters counters;

void note_tier_error(int error) {
  counters.tier_errors++;
  const Hold lock(budget.error_lock);
  budget.tier_error = std::strerror(error);
}

}  // namespace memmgr::pager
