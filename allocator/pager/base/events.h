// Events for observers: how often cells were evicted, restored and rematerialized, by op and module.
#pragma once

#include <c10/macros/Macros.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <tuple>

#include "base/constants.h"

namespace memmgr::pager {

struct OpInfo;

// True while an observer is connected. Events are recorded only then, in a table of bounded size.
extern std::atomic<bool> watched;

// Records an event. `op` made the bytes, in the module with this number; null and 0: not known. The caller holds the
// graph's lock or none.
void add_event(Event what, const OpInfo* op, uint32_t module, uint64_t bytes, uint64_t ns);

struct EventSum {
  uint64_t count = 0, bytes = 0, ns = 0;
};
// The event, the op that made the bytes, and its module.
using EventKey = std::tuple<uint8_t, const OpInfo*, uint32_t>;
struct EventSums {
  std::map<EventKey, EventSum> sums;
  uint64_t unlisted = 0;  // events beyond the bound of the table
};
EventSums take_events();  // those since the last call

void watch_events(bool on);  // the table is empty afterwards
void end_watch();            // recorded events can still be taken

}  // namespace memmgr::pager
