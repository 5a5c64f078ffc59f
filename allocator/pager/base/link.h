// The link to the tier, as its transfers were measured.
#pragma once

namespace memmgr::pager {

// Seconds a byte of the tier's latest transfers: in each direction, and of a processor in either.
struct Link {
  double write_seconds_per_byte, read_seconds_per_byte, cpu_seconds_per_byte;
};
Link link();
void set_link(double seconds_per_byte);
void set_link_cpu(double seconds_per_byte);
void note_link_locked();  // the transfers since the last call; under the graph's lock

}  // namespace memmgr::pager
