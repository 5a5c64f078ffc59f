// What the ops of a thread take for themselves.
#include <algorithm>

#include "pool.h"

namespace memmgr::pager {

thread_local int tl_side = MM_SIDE_LOW;
thread_local int tl_fill = -1;

static thread_local int64_t tl_scratch = 0;
static thread_local int64_t tl_scratch_peak = 0;

void begin_scratch() { tl_scratch = tl_scratch_peak = 0; }
void note_scratch_taken(uint64_t nbytes) {
  const int64_t now = tl_scratch += static_cast<int64_t>(nbytes);
  if (now > tl_scratch_peak) tl_scratch_peak = now;
}
void note_scratch_given(uint64_t nbytes) { tl_scratch -= static_cast<int64_t>(nbytes); }
uint64_t scratch_now() { return static_cast<uint64_t>(std::max<int64_t>(0, tl_scratch)); }
uint64_t scratch_peak() { return static_cast<uint64_t>(tl_scratch_peak); }
ScratchStays::ScratchStays() : before(tl_scratch) {}
ScratchStays::~ScratchStays() { tl_scratch = before; }

}  // namespace memmgr::pager
