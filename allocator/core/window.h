// Chooses the blocks to evict so that a request fits: Coop's sliding window, or where no run is wanted the cheapest
// bytes.
//
// Words:
//   price    cost of making a live block free: cost / staleness^exponent, both from the policies, evaluated in a
//   search,
//            so that ageing costs nothing. A block without a price is pinned
//   piece    a block or a run in a search: bytes and price; a run's is 0, and of the last run only the part below the
//            limit counts
//   window   pieces next to each other, none pinned, whose bytes are enough. A run at its end may be longer than
//            needed: free bytes cost nothing
//
// Sources: the window is Coop's (Zhang et al., NeurIPS 2023); the cheapest per byte first is DTR's loop. Deviations
// from Coop: the window is compared by the sum of the blocks' prices, not by summed cost over one staleness; among
// equals the lowest one wins.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "block_index.h"

namespace memmgr {

inline constexpr float kPinnedCost = -1;

class Chooser {
 public:
  // The `count` blocks from `first` to `last`, as pieces. `now` is on the clock of last_access. May throw
  // std::bad_alloc.
  void Gather(const Block* first, const Block* last, size_t count, uint64_t limit, double now, double exponent);
  // Victims that free `needed` bytes in all, and `run_bytes` of them in one run (0: no run is needed): in address order
  // for the window, otherwise in their order of eviction. False: the goal cannot be reached.
  bool Choose(uint64_t run_bytes, uint64_t needed);
  const std::vector<const Block*>& victims() const { return victims_; }

 private:
  void See(const Block* block, double now, size_t i);
  bool Window(uint64_t bytes);
  bool Cheapest(uint64_t needed);

  // Columns, one entry per piece; longer than n_ and never shortened.
  size_t n_ = 0;
  std::vector<const Block*> block_;
  std::vector<uint64_t> bytes_;
  std::vector<float> price_;  // negative: pinned; 0: free
  std::vector<float> staleness_;
  std::vector<double> units_;  // prices as whole numbers
  std::vector<std::pair<double, uint32_t>> heap_;
  std::vector<const Block*> victims_;
  uint64_t freed_ = 0;
};

}  // namespace memmgr
