// Memory that the ops of a thread take for themselves.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "memmgr/core.h"
#include "memmgr/device.h"

namespace memmgr::pager {

// How this thread's op takes memory, and the bytes that it has taken since `begin_scratch`.
struct Taking {
  int fill = -1;             // the byte that fills memory where the pool fills; below 0: none
  int64_t scratch = 0;       // bytes taken and not freed
  int64_t scratch_peak = 0;  // their high-water mark
  // Points before and after each search for memory of an op that is timed on a device. In between the device runs no
  // kernel of the op, and may wait for the host or for a former user of the memory. Null: no op is timed.
  mm_points* points = nullptr;
  std::vector<std::pair<int, int>> searches;
  void begin_scratch() { scratch = scratch_peak = 0; }
  void take(uint64_t nbytes) {
    scratch += static_cast<int64_t>(nbytes);
    if (scratch > scratch_peak) scratch_peak = scratch;
  }
};
Taking& taking();  // keep the reference: finding this thread's costs more than using it

// While it lives, memory that this thread takes is filled with the byte, where the pool fills.
struct Filling {
  explicit Filling(int byte) : before(taking().fill) { taking().fill = byte; }
  ~Filling() { taking().fill = before; }
  Filling(const Filling&) = delete;
  const int before;
};

void begin_scratch();
void note_scratch_taken(uint64_t nbytes);
void note_scratch_given(uint64_t nbytes);
uint64_t scratch_now();  // those that are not freed
uint64_t scratch_peak();
// While it lives, cells that are evicted inside an op's malloc do not count as memory that the op frees.
struct ScratchStays {
  ScratchStays();
  ScratchStays(const ScratchStays&) = delete;
  ScratchStays& operator=(const ScratchStays&) = delete;
  ~ScratchStays();
  const int64_t before;
};

}  // namespace memmgr::pager
