// Chooses the blocks to evict so that a request fits: Coop's sliding window, and the searches that it is measured
// against.
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
// Sources: the window is Coop's (Zhang et al., NeurIPS 2023); `by score` is DTR's loop, evict the cheapest per byte
// until it fits; `dte` is the same with the free bytes beside a block counted as its own (Dynamic Tensor Evictor,
// MegEngine). Deviations from Coop: the window is compared by the sum of the blocks' prices, not by summed cost over
// one staleness; among equals the lowest one wins.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "block_index.h"

namespace memmgr {

inline constexpr float kPinnedCost = -1;

enum class Search : int { kScore = 0, kDte = 1, kWindow = 2 };

class Chooser {
 public:
  // The conditions that must hold afterwards.
  struct Goal {
    uint64_t bytes;   // so many of them free in one run; 0: no run is needed
    uint64_t needed;  // freed in all
  };

  // The `count` blocks from `first` to `last`, as pieces. `now` is on the clock of last_access. May throw
  // std::bad_alloc.
  void Gather(const Block* first, const Block* last, size_t count, uint64_t limit, double now, double exponent);
  // Victims in address order for the window, otherwise in their order of eviction. False: the goal cannot be reached.
  bool Choose(Search how, Goal goal);
  const std::vector<const Block*>& victims() const { return victims_; }

 private:
  void See(const Block* block, double now, size_t i);
  bool Window(uint64_t bytes);
  bool ByScore(Goal goal, bool count_neighbours);
  std::pair<size_t, size_t> Take(size_t piece);
  double Score(size_t piece, bool count_neighbours) const;

  // Columns, one entry per piece; longer than n_ and never shortened.
  size_t n_ = 0;
  std::vector<const Block*> block_;
  std::vector<uint64_t> bytes_;
  std::vector<float> price_;  // negative: pinned; 0: free
  std::vector<float> staleness_;
  std::vector<double> units_;      // prices as whole numbers
  std::vector<uint32_t> far_end_;  // at both ends of a run of free pieces: where its other end is
  std::vector<uint64_t> before_;   // bytes of all pieces before this one
  std::vector<std::pair<double, uint32_t>> heap_;
  std::vector<const Block*> victims_;
  uint64_t freed_ = 0;
  uint64_t longest_ = 0;
};

}  // namespace memmgr
