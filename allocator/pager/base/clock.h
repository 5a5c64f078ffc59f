// The clocks: the system's, and the processor's, which tests may count instead.
#pragma once

#include <cstdint>

namespace memmgr::pager {

uint64_t now_ns();

// The clock of a device's marks (memmgr/device.h): work that is queued now is older than any later mark.
extern const uint64_t* const device_clock;
inline uint64_t device_time() { return __atomic_load_n(device_clock, __ATOMIC_ACQUIRE); }

// The clock of staleness and costs: ticks that are cheap to read, all of one length.
uint64_t ticks();
double seconds_of_ticks(uint64_t n);
// For tests: each look at the clock advances it by so many ticks, and nothing else does; 0: the machine's time again.
void count_ticks(uint64_t step);
// For tests: replaces both clocks by this function, before the first budget of the process. It may take no lock.
void read_clock(uint64_t (*nanoseconds)());

}  // namespace memmgr::pager
