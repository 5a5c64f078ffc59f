// The link to the tier, as its transfers were measured.
#pragma once

#include "base/lock.h"
#include "memmgr/core.h"

namespace memmgr::pager {

// Seconds a byte of the tier's latest transfers: in each direction, and of a processor in either.
struct Link {
  double write_seconds_per_byte, read_seconds_per_byte, cpu_seconds_per_byte;
};
Link link();
void set_link(double seconds_per_byte);
void set_link_cpu(double seconds_per_byte);
// The transfers of this tier since the last call. Under the graph's lock.
void note_link_locked(mm_tier* tier) REQUIRES(graph_lock());

}  // namespace memmgr::pager
