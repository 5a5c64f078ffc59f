// Memory that the ops of a thread take for themselves.
#pragma once

#include <cstdint>

#include "memmgr/core.h"

namespace memmgr::pager {

// How this thread's op takes memory, and what it has taken since `begin_scratch`.
struct Taking {
  int side = MM_SIDE_LOW;    // where large blocks lie, where sides differ
  int fill = -1;             // what fills memory of the host's pool; not below 0
  int64_t scratch = 0;       // bytes taken and not given back
  int64_t scratch_peak = 0;  // their high-water mark
  void begin_scratch() { scratch = scratch_peak = 0; }
  void take(uint64_t nbytes) {
    scratch += static_cast<int64_t>(nbytes);
    if (scratch > scratch_peak) scratch_peak = scratch;
  }
};
Taking& taking();  // keep it: to find this thread's costs more than to use it

// Fills memory that this thread takes from the host's pool, meanwhile.
struct Filling {
  explicit Filling(int byte) : before(taking().fill) { taking().fill = byte; }
  ~Filling() { taking().fill = before; }
  Filling(const Filling&) = delete;
  const int before;
};

void begin_scratch();
void note_scratch_taken(uint64_t nbytes);
void note_scratch_given(uint64_t nbytes);
uint64_t scratch_now();  // of it, what is there still
uint64_t scratch_peak();
// Cells that leave meanwhile, from inside of an op's malloc, are not what the op gives back.
struct ScratchStays {
  ScratchStays();
  ScratchStays(const ScratchStays&) = delete;
  ScratchStays& operator=(const ScratchStays&) = delete;
  ~ScratchStays();
  const int64_t before;
};

}  // namespace memmgr::pager
