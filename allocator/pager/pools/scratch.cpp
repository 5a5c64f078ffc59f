#include "pools/scratch.h"

#include <c10/macros/Macros.h>

#include <algorithm>

namespace memmgr::pager {

C10_NOINLINE Taking& taking() {
  static thread_local Taking here;
  return here;
}

void begin_scratch() { taking().begin_scratch(); }
void note_scratch_taken(uint64_t nbytes) { taking().take(nbytes); }
void note_scratch_given(uint64_t nbytes) { taking().scratch -= static_cast<int64_t>(nbytes); }
uint64_t scratch_now() { return static_cast<uint64_t>(std::max<int64_t>(0, taking().scratch)); }
uint64_t scratch_peak() { return static_cast<uint64_t>(taking().scratch_peak); }
ScratchStays::ScratchStays() : before(taking().scratch) {}
ScratchStays::~ScratchStays() { taking().scratch = before; }

}  // namespace memmgr::pager
