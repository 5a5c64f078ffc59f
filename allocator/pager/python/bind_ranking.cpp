#include "python/bind_ranking.h"

// The Python module's functions for policies that rank victims ahead of need. No op calls them.

#include <cstring>

#include "base/gil.h"
#include "residency/victims.h"

namespace memmgr::pager {

struct CandidateColumns {
  Column<int64_t> serials, sizes;
  Column<double> stale_seconds, cost_seconds, chain_seconds;
  Column<uint8_t> recomputable, clean, offloadable;
};

FIELDS(CandidateColumns,
       "Cells that can be evicted now, in columns as bytes: int64 serials and sizes, float64 seconds, bool.", serials,
       sizes, stale_seconds, cost_seconds, chain_seconds, recomputable, clean, offloadable)

namespace {

CandidateColumns py_candidates() {
  std::vector<Candidate> all;
  {
    const WithoutGil released;
    all = candidates();
  }
  CandidateColumns columns;
  for (const Candidate& c : all) {
    columns.serials.push_back(static_cast<int64_t>(c.serial));
    columns.sizes.push_back(static_cast<int64_t>(c.nbytes));
    columns.stale_seconds.push_back(c.stale_seconds);
    columns.cost_seconds.push_back(c.cost_seconds);
    columns.chain_seconds.push_back(c.chain_seconds);
    columns.recomputable.push_back(c.droppable);
    columns.clean.push_back(c.clean);
    columns.offloadable.push_back(c.offloadable);
  }
  return columns;
}

void py_set_ranking(Bytes serials, Bytes ways) {
  if (serials.size() != ways.size() * sizeof(int64_t)) raise_error(PyExc_ValueError, "an int64 and a uint8 for each");
  std::vector<std::pair<uint64_t, Way>> ranked;
  for (size_t i = 0; i < ways.size(); ++i) {
    uint64_t serial;
    std::memcpy(&serial, serials.data() + i * sizeof serial, sizeof serial);
    const auto way = static_cast<uint8_t>(ways.data()[i]);
    ranked.emplace_back(serial, way < kValues<Way> ? static_cast<Way>(way) : Way::kCheaper);
  }
  const WithoutGil released;
  set_ranking(ranked);
}

void py_wait_for_pressure() {
  const WithoutGil released;
  wait_for_pressure();
}

}  // namespace

void bind_ranking(Module& m) {
  m.def<&py_candidates>("candidates", "", "The cells that can be evicted now, the one that was touched last first.");
  m.def<&py_set_ranking>("set_ranking", "serials, ways",
                         "The cells to evict next, the first one first: int64 serials, and a uint8 of Way for each.");
  m.def<&py_wait_for_pressure>("wait_for_pressure", "",
                               "Waits without the GIL until an order is wanted, or until end_wait_for_pressure().");
  m.def<&end_wait_for_pressure>("end_wait_for_pressure", "", "No order is wanted any more.");
}

}  // namespace memmgr::pager
