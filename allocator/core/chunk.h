// How long the pieces are in which the memory of pages is moved, chosen by the blocks that lacked pages.
//
// A short chunk is moved often. With a long one, the rest of a block after its last whole chunk comes from the system,
// cleared page by page. Best are lengths that many blocks are multiples of: nine tenths of a GPT's requests are 3, 8
// and 12 times 192 KiB, and with 64 KiB every block takes three times the moves.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace memmgr {

class ChunkChoice {
 public:
  // A block of so many pages, of which `missing` had to be found. True: it is time to choose again.
  bool Note(uint64_t pages, uint64_t missing);
  // The length in pages, from least to most, at which these blocks take the least time. It is `now` unless another is
  // better by a tenth: free pieces of the old length go to the system, and their pages are fetched anew.
  uint64_t Best(uint64_t now, uint64_t least, uint64_t most) const;

 private:
  struct Size {
    uint64_t pages = 0;
    double blocks = 0;  // each by the share of it that was missing
  };
  double Cost(uint64_t chunk) const;  // us

  std::array<Size, 32> sizes_{};
  uint64_t noted_ = 0;
};

}  // namespace memmgr
