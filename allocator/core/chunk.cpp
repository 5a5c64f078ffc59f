#include "chunk.h"

#include <algorithm>
#include <bit>

namespace memmgr {
namespace {

constexpr uint64_t kNotes = 512;  // between two choices
constexpr uint64_t kFirst = 64;   // before the first one, and as many again before the next
constexpr uint64_t kParts = 16;   // a length is tried for at most so many parts of a block
constexpr double kBetter = 0.9;   // of the cost of the length in use
constexpr double kMove = 17;      // microseconds, while a thread works, up to 1 MiB
constexpr double kPage = 2;  // us, to give one to the system and to fetch another: 2.6, and an op's threads share it
constexpr double kRemainder = 20;  // us, the calls that a block's end takes
constexpr double kLost = 1.5;  // chunks of a block that come from the system, since the free bytes are no whole chunk

}  // namespace

bool ChunkChoice::Note(uint64_t pages, uint64_t missing) {
  // The length that has it, else an empty place, else that of the rarest.
  Size* place = sizes_.data();
  for (Size& size : sizes_) {
    if (size.pages == pages) {
      place = &size;
      break;
    }
    if (size.blocks < place->blocks) place = &size;
  }
  if (place->pages != pages) *place = {pages, 0};
  place->blocks += static_cast<double>(missing) / static_cast<double>(pages);
  ++noted_;
  if (noted_ < kNotes ? noted_ < kFirst || !std::has_single_bit(noted_) : noted_ % kNotes != 0) return false;
  for (Size& size : sizes_) size.blocks /= 2;  // older blocks count less
  return true;
}

double ChunkChoice::Cost(uint64_t chunk) const {
  double sum = 0;
  for (const Size& size : sizes_) {
    const uint64_t rest = size.pages % chunk;
    const double end = rest != 0 ? kRemainder + kPage * static_cast<double>(rest) : 0;
    const double lost = kLost * kPage * static_cast<double>(std::min(chunk, size.pages));
    sum += size.blocks * (kMove * static_cast<double>(size.pages / chunk) + end + lost);
  }
  return sum;
}

uint64_t ChunkChoice::Best(uint64_t now, uint64_t least, uint64_t most) const {
  uint64_t best = std::clamp(now, least, most);
  double lowest = kBetter * Cost(best);
  for (const Size& size : sizes_) {
    for (uint64_t parts = 1; parts <= kParts; ++parts) {
      const uint64_t chunk = size.pages / parts;
      if (chunk < least) break;
      if (chunk > most) continue;
      const double cost = Cost(chunk);
      if (cost < lowest) {
        lowest = cost;
        best = chunk;
      }
    }
  }
  return best;
}

}  // namespace memmgr
