// malloc's own orders of eviction. policies/rules/filters.py has the same scores for the simulator and for ranking
// threads; tests/pager/test_scores.py compares the two. This unit needs no torch.
#pragma once

#include <cstdint>

#include "base/constants.h"

namespace memmgr::pager {

// The lowest is evicted first. `cost`: seconds to restore the cell; `age`: of its last use, or the time until its next
// one, in any unit. kRanked: until there is a ranking, DTR's order.
inline double score(Order order, double cost, uint64_t nbytes, double age) {
  const double m = static_cast<double>(nbytes);
  switch (order) {
    case Order::kLru:
      return 1 / age;
    case Order::kLargest:
      return 1 / m;
    case Order::kDelta:
      return 1 / (m * age);
    case Order::kDtr:
    case Order::kRanked:
      break;
  }
  return (cost + 1e-7) / (m * age);
}

}  // namespace memmgr::pager
