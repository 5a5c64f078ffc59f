// The kernels that look at, or fill, memory of a device, so that its bytes need not be fetched. The core embeds their
// PTX text (device_kernels.ptx.h, which says how it is made). The functions above the kernels are also plain C++: the
// double of the driver (tests/driver) runs them on the host, one call for each thread of a launch.
//
// Any address and any number of bytes is right; starts that are not multiples of 16 are slow.
#include <stdint.h>

#ifdef __CUDACC__
#define MEMMGR_KERNEL_PART __device__ __forceinline__
#define MEMMGR_UNROLL _Pragma("unroll 4")
#else
#define MEMMGR_KERNEL_PART inline
#define MEMMGR_UNROLL
#endif

namespace memmgr_kernels {

struct alignas(16) Pair {
  uint64_t first, second;
};

// Which of the words of a block one thread has: its number, then steps of `of`.
struct Share {
  uint64_t number, of;
};

MEMMGR_KERNEL_PART bool Aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % sizeof(Pair) == 0; }

// The word at this place of the block, with zeros behind the block's end.
MEMMGR_KERNEL_PART uint64_t WordAt(const unsigned char* p, uint64_t bytes, uint64_t at) {
  uint64_t word = 0;
  const uint64_t begin = at * sizeof word;
  for (uint64_t i = 0; i < sizeof word && begin + i < bytes; ++i) word |= uint64_t{p[begin + i]} << (8 * i);
  return word;
}

// For each place a one-to-one function of the word, so that a change of one word always changes the sum.
MEMMGR_KERNEL_PART uint64_t Mix(uint64_t word, uint64_t at) {
  word ^= (at + 1) * 0x9E3779B97F4A7C15ull;
  word ^= word >> 32;
  word *= 0xD6E8FEB86659FD93ull;
  word ^= word >> 29;
  word *= 0xD6E8FEB86659FD93ull;
  return word ^ word >> 32;
}

// The shares of all threads add up to the sum of the block, modulo 2^64.
MEMMGR_KERNEL_PART uint64_t SumOf(const unsigned char* p, uint64_t bytes, Share mine) {
  const uint64_t pairs = Aligned(p) ? bytes / sizeof(Pair) : 0;
  const uint64_t words = (bytes + 7) / 8;
  const Pair* pair = reinterpret_cast<const Pair*>(p);
  uint64_t sum = 0;
  MEMMGR_UNROLL
  for (uint64_t i = mine.number; i < pairs; i += mine.of) {
    const Pair two = pair[i];
    sum += Mix(two.first, 2 * i) + Mix(two.second, 2 * i + 1);
  }
  for (uint64_t i = 2 * pairs + mine.number; i < words; i += mine.of) sum += Mix(WordAt(p, bytes, i), i);
  return sum;
}

// One half of 8 bytes, of the first result and of the second: bits of mm_compared (memmgr/device.h).
MEMMGR_KERNEL_PART uint32_t CompareHalf(uint32_t first, uint32_t second, uint64_t filled) {
  const bool equal = first == second, left_alone = second == filled;
  return (equal ? 0u : 1u) | (left_alone ? 2u : 8u) | (equal || left_alone ? 0u : 4u);
}

MEMMGR_KERNEL_PART uint32_t CompareWord(uint64_t first, uint64_t second, uint64_t filled) {
  return CompareHalf(static_cast<uint32_t>(first), static_cast<uint32_t>(second), filled) |
         CompareHalf(static_cast<uint32_t>(first >> 32), static_cast<uint32_t>(second >> 32), filled);
}

// The 4 bytes at this place, with those of `filled` behind the block's end.
MEMMGR_KERNEL_PART uint32_t HalfAt(const unsigned char* p, uint64_t bytes, uint64_t at, uint64_t filled) {
  uint32_t half = 0;
  for (uint64_t i = 0; i < sizeof half; ++i) {
    const uint64_t byte = sizeof half * at + i;
    half |= uint32_t{byte < bytes ? p[byte] : static_cast<unsigned char>(filled)} << (8 * i);
  }
  return half;
}

// `filled`: the 4 bytes that the second block was full of before it was written. From 2^32 on: it was not filled.
MEMMGR_KERNEL_PART uint32_t CompareIn(const unsigned char* first, const unsigned char* second, uint64_t bytes,
                                      uint64_t filled, Share mine) {
  const uint64_t pairs = Aligned(first) && Aligned(second) ? bytes / sizeof(Pair) : 0;
  const Pair* left = reinterpret_cast<const Pair*>(first);
  const Pair* right = reinterpret_cast<const Pair*>(second);
  uint32_t found = 0;
  MEMMGR_UNROLL
  for (uint64_t i = mine.number; i < pairs; i += mine.of) {
    const Pair one = left[i], two = right[i];
    found |= CompareWord(one.first, two.first, filled) | CompareWord(one.second, two.second, filled);
  }
  const uint64_t halves = (bytes + 3) / 4;
  for (uint64_t i = 4 * pairs + mine.number; i < halves; i += mine.of)
    found |= CompareHalf(HalfAt(first, bytes, i, filled), HalfAt(second, bytes, i, filled), filled);
  return found;
}

// `word` holds the byte eight times.
MEMMGR_KERNEL_PART void FillWith(unsigned char* p, uint64_t bytes, uint64_t word, Share mine) {
  const uint64_t pairs = Aligned(p) ? bytes / sizeof(Pair) : 0;
  Pair* pair = reinterpret_cast<Pair*>(p);
  for (uint64_t i = mine.number; i < pairs; i += mine.of) pair[i] = Pair{word, word};
  for (uint64_t i = sizeof(Pair) * pairs + mine.number; i < bytes; i += mine.of)
    p[i] = static_cast<unsigned char>(word);
}

}  // namespace memmgr_kernels

#ifdef __CUDACC__

static __device__ __forceinline__ memmgr_kernels::Share Mine() {
  return {blockIdx.x * uint64_t{blockDim.x} + threadIdx.x, gridDim.x * uint64_t{blockDim.x}};
}

// Adds the sum to *result. The number of threads of a block is a multiple of 32, here and in mm_compare.
extern "C" __global__ void mm_sum(const unsigned char* p, uint64_t bytes, unsigned long long* result) {
  unsigned long long sum = memmgr_kernels::SumOf(p, bytes, Mine());
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_down_sync(0xFFFFFFFFu, sum, lanes);
  if (threadIdx.x % 32 == 0) atomicAdd(result, sum);
}

// Sets the bits of mm_compared that were found in *result.
extern "C" __global__ void mm_compare(const unsigned char* first, const unsigned char* second, uint64_t bytes,
                                      uint64_t filled, unsigned long long* result) {
  unsigned found = memmgr_kernels::CompareIn(first, second, bytes, filled, Mine());
  for (int lanes = 16; lanes > 0; lanes /= 2) found |= __shfl_down_sync(0xFFFFFFFFu, found, lanes);
  if (threadIdx.x % 32 == 0 && found != 0) atomicOr(result, static_cast<unsigned long long>(found));
}

extern "C" __global__ void mm_fill(unsigned char* p, uint64_t bytes, uint64_t word) {
  memmgr_kernels::FillWith(p, bytes, word, Mine());
}

// Copies a word to page-locked memory of the host. A copy by the driver would wait for all copies to the host that are
// queued before it, on whichever stream.
extern "C" __global__ void mm_word(const uint64_t* from, uint64_t* to) {
  if (Mine().number == 0) *to = *from;
}

// Keeps the stream busy. The clock's rate is not known: a device below 2 GHz takes longer than the nanoseconds given.
extern "C" __global__ void mm_delay(uint64_t nanoseconds) {
  const long long end = clock64() + static_cast<long long>(2 * nanoseconds);
  while (clock64() < end) {
  }
}

#endif
