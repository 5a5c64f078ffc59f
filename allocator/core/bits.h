// Bytes whose elements take two values only, as one bit each: dropout masks, comparisons. Exact, or refused.
//
// Source: Gist's Binarize (Jain et al., ISCA 2018), which derives from the layer that one bit will do. Here the bytes
// are examined, so any two values work, and the op that made them does not matter.
#pragma once
#include <cstdint>

#include "memmgr/core.h"

namespace memmgr {

// The bits of `bytes` bytes at `from`, in memory of their own: how many bytes of it, or 0 if there are more than two
// values for every size of element, which a few elements tell almost always, or no memory.
uint64_t PackBits(const void* from, uint64_t bytes, mm_bits* out);

// The same bytes again.
void UnpackBits(const mm_bits& from, void* to, uint64_t bytes);

void FreeBits(mm_bits* bits);

}  // namespace memmgr
