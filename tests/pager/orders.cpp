// The scores of malloc's own orders, for tests/pager/test_ranking.py.
#include "residency/score.h"

extern "C" double mm_score(uint8_t order, double cost, uint64_t nbytes, double age) {
  return memmgr::pager::score(static_cast<memmgr::pager::Order>(order), cost, nbytes, age);
}
