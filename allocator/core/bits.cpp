#include "bits.h"

#include <algorithm>
#include <cstdlib>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace memmgr {
namespace {

// Eight elements are a byte. The loops have no branch inside, so that the compiler can unroll them.
template <typename T>
bool PackEight(const T* from, T zero, T one, uint8_t* byte) {
  unsigned ones = 0, known = 0;
  for (unsigned j = 0; j < 8; ++j) {
    ones |= static_cast<unsigned>(from[j] == one) << j;
    known |= static_cast<unsigned>(from[j] == one || from[j] == zero) << j;
  }
  *byte = static_cast<uint8_t>(ones);
  return known == 0xff;
}

template <typename T>
void UnpackEight(uint8_t byte, T zero, T one, T* to) {
  for (unsigned j = 0; j < 8; ++j) to[j] = (byte >> j & 1) != 0 ? one : zero;
}

#if defined(__SSE2__)
// Masks of floats are the most frequent ones.
template <>
bool PackEight<uint32_t>(const uint32_t* from, uint32_t zero, uint32_t one, uint8_t* byte) {
  const __m128i z = _mm_set1_epi32(static_cast<int>(zero)), o = _mm_set1_epi32(static_cast<int>(one));
  const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 4));
  const auto equal = [&](__m128i x) {
    return static_cast<unsigned>(_mm_movemask_ps(_mm_castsi128_ps(_mm_cmpeq_epi32(a, x))) |
                                 _mm_movemask_ps(_mm_castsi128_ps(_mm_cmpeq_epi32(b, x))) << 4);
  };
  const unsigned ones = equal(o);
  *byte = static_cast<uint8_t>(ones);
  return (ones | equal(z)) == 0xff;
}

template <>
void UnpackEight<uint32_t>(uint8_t byte, uint32_t zero, uint32_t one, uint32_t* to) {
  const __m128i z = _mm_set1_epi32(static_cast<int>(zero)), o = _mm_set1_epi32(static_cast<int>(one));
  const __m128i all = _mm_set1_epi32(byte);
  const auto put = [&](__m128i which, uint32_t* at) {
    const __m128i set = _mm_cmpeq_epi32(_mm_and_si128(all, which), which);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm_or_si128(_mm_and_si128(set, o), _mm_andnot_si128(set, z)));
  };
  put(_mm_set_epi32(8, 4, 2, 1), to);
  put(_mm_set_epi32(128, 64, 32, 16), to + 4);
}
#endif

template <typename T>
bool Pack(const T* from, uint64_t count, uint8_t* bits, uint64_t values[2]) {
  const T zero = from[0];
  const T* other = std::find_if(from, from + count, [zero](T x) { return x != zero; });
  const T one = other == from + count ? zero : *other;
  values[0] = zero;
  values[1] = one;
  const uint64_t whole = count / 8;
  for (uint64_t i = 0; i < whole; ++i)
    if (!PackEight(from + 8 * i, zero, one, bits + i)) return false;
  if (count % 8 == 0) return true;
  T rest[8];
  for (uint64_t j = 0; j < 8; ++j) rest[j] = j < count % 8 ? from[8 * whole + j] : zero;
  return PackEight(rest, zero, one, bits + whole);
}

template <typename T>
void Unpack(const uint8_t* bits, const uint64_t values[2], T* to, uint64_t count) {
  const auto zero = static_cast<T>(values[0]), one = static_cast<T>(values[1]);
  const uint64_t whole = count / 8;
  for (uint64_t i = 0; i < whole; ++i) UnpackEight(bits[i], zero, one, to + 8 * i);
  if (count % 8 == 0) return;
  T rest[8];
  UnpackEight(bits[whole], zero, one, rest);
  std::copy_n(rest, count % 8, to + 8 * whole);
}

// Calls `with` on an element of `item` bytes.
template <typename With>
auto ForItem(uint32_t item, With with) {
  switch (item) {
    case 1:
      return with(uint8_t{});
    case 2:
      return with(uint16_t{});
    case 4:
      return with(uint32_t{});
    default:
      return with(uint64_t{});
  }
}

constexpr uint64_t kProbed = 4096;  // a multiple of every element

}  // namespace

uint64_t PackBits(const void* from, uint64_t bytes, mm_bits* out) {
  if (bytes == 0) return 0;
  for (const uint32_t item : {8u, 4u, 2u, 1u}) {
    if (bytes % item != 0 || reinterpret_cast<uintptr_t>(from) % item != 0) continue;
    const auto pack = [&](uint64_t some, uint8_t* bits) {
      return ForItem(item,
                     [&](auto x) { return Pack(static_cast<const decltype(x)*>(from), some, bits, out->values); });
    };
    uint8_t probe[kProbed / 8];
    if (!pack(std::min(bytes, kProbed) / item, probe)) continue;
    const uint64_t count = bytes / item, size = (count + 7) / 8;
    auto* bits = static_cast<uint8_t*>(std::malloc(size));
    if (bits == nullptr) return 0;
    if (pack(count, bits)) {
      out->bits = bits;
      out->item = item;
      return size;
    }
    std::free(bits);
  }
  return 0;
}

void UnpackBits(const mm_bits& from, void* to, uint64_t bytes) {
  ForItem(from.item, [&](auto x) {
    Unpack(static_cast<const uint8_t*>(from.bits), from.values, static_cast<decltype(x)*>(to), bytes / from.item);
  });
}

void FreeBits(mm_bits* bits) {
  std::free(bits->bits);
  bits->bits = nullptr;
}

}  // namespace memmgr
