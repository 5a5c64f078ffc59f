// Blocks and the three structures that find them. Nothing here ever writes into the memory that is managed: it may be
// device memory, and a stray write of the user's must not be able to damage the bookkeeping.
//
// Words:
//   block      a piece of an area, live or free; blocks tile the area and are linked in address order
//   run        a free block; no two runs touch (they are coalesced at once)
//   best fit   the smallest run that is long enough, and the lowest address among equals
//   pool       a number: memory that is reused only for the same one. 0 is everybody's
//   away       of no run and no owner while its pages are being given back; looks like a live block that nobody has
//   bin        runs of about the same size, in a treap ordered by (bytes, offset)
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "touched.h"

namespace memmgr {

// State of the whole pages of a run. Each kind has its own index, because a request prefers memory that it need not
// commit, and because giving pages back must find runs that have some without searching.
enum class RunKind : uint8_t {
  kFragment,   // contains no whole page: it is committed by its neighbours and cannot be given back
  kCommitted,  // every whole page is committed
  kMixed,      // some are
  kHole,       // none is
};
inline constexpr int kRunKinds = 4;

inline constexpr uint8_t kAway = 255;  // the pool of runs whose pages are being given back

struct alignas(64) Block {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  Block* previous = nullptr;  // in address order
  Block* next = nullptr;
  // A run stands in the treap of its bin; a live block has its price there (window.h).
  union {
    Block* left = nullptr;
    void* owner;
  };
  union {
    Block* right = nullptr;
    double last_access;
  };
  float cost = 0;         // live: the cost of making it free, before staleness; negative: pinned
  uint32_t holes = 0;     // pages of this run that are not committed; 0 in a live block that was handed out
  TouchedId touched = 0;  // the streams that are known to use this memory; 0: there are no streams
  union {
    uint16_t priority = 0;  // of a run, in its treap
    uint16_t slack;         // live: bytes - requested bytes; less than a large unit
  };
  union {
    RunKind kind = RunKind::kFragment;
    uint16_t home;  // live: the number of the stream in whose order it was allocated
  };
  uint8_t pool = 0;
  bool live = false;
  // The time of the last use by each stream of `touched`. For a live block, the time of a program's stream is kTail,
  // or the one that Arena::NoteUse set, until a stream has waited for it.
  StreamTimes times;
};
static_assert(offsetof(Block, times) == 64, "what has to do with streams lies beyond the first cache line");

// Descriptors, recycled. They are never given back before the arena ends: a few hundred bytes per hundred blocks.
class BlockPool {
 public:
  void Reserve();  // makes sure of two; the only place that can throw
  Block* Take();
  void Return(Block* block);

 private:
  static constexpr size_t kSlab = 1024;
  std::vector<std::unique_ptr<Block[]>> slabs_;
  Block* recycled_ = nullptr;
};

// offset -> live block: open addressing with linear probing, at most half full; deleting shifts back, so that there are
// no tombstones and a long run does not slow down.
class BlockTable {
 public:
  BlockTable();
  void ReserveOne();  // the only place that can throw
  void Insert(Block* block);
  Block* Find(uint64_t offset) const;
  void Erase(uint64_t offset);
  uint64_t size() const { return size_; }

 private:
  struct Entry {
    uint64_t offset;
    Block* block;  // nullptr: empty
  };
  uint64_t Home(uint64_t offset) const { return (offset * 0x9E3779B97F4A7C15ull) >> shift_; }
  void Place(Block* block);

  std::vector<Entry> entries_;
  uint64_t mask_;
  int shift_;
  uint64_t size_ = 0;
};

// The runs of one kind, for best fit. Bins as in two-level segregated fit, eight to a power of two; unlike there, the
// runs of a bin are ordered, so that the fit is exactly the best one.
class RunIndex {
 public:
  explicit RunIndex(int unit_shift) : unit_shift_(unit_shift) {}
  void Insert(Block* run);
  void Erase(Block* run);
  // The first run of at least (bytes, offset) in the order of best fit.
  Block* BestFit(uint64_t bytes, uint64_t offset = 0) const;
  Block* Largest(const Block* except = nullptr) const;
  // The last run before (bytes, offset) in that order.
  Block* Below(uint64_t bytes, uint64_t offset) const;
  uint64_t size() const { return size_; }

 private:
  static constexpr int kWords = 6;
  static constexpr int kBins = kWords * 64;
  int BinOf(uint64_t bytes) const;
  int NextBin(int bin) const;      // the first bin from there on that is not empty, or -1
  int PreviousBin(int bin) const;  // the last one up to here

  int unit_shift_;
  uint64_t size_ = 0;
  std::array<uint64_t, kWords> occupied_{};
  std::array<Block*, kBins> roots_{};
};

// The order of best fit.
inline bool FitsTighter(const Block* a, const Block* b) {
  return a->bytes != b->bytes ? a->bytes < b->bytes : a->offset < b->offset;
}

// The better of two candidates of different indexes; either may be nullptr.
inline Block* Tighter(Block* a, Block* b) {
  if (a == nullptr || b == nullptr) return a != nullptr ? a : b;
  return FitsTighter(a, b) ? a : b;
}

}  // namespace memmgr
