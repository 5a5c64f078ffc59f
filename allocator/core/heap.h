// Heap: the blocks of one area, in address order, and the pages under them. No lock and no budget: Arena has those.
//
// Words:
//   area         a part of the arena's range with its own unit: one for small blocks, one for all others, so that a
//   small
//                block with a long life never splits the space that large ones need
//   unit         every size and offset is a multiple of it; a power of two
//   whole pages  the pages that lie completely inside a run; only they can be given back
//   spare pages  committed whole pages of runs: reuse without a page fault, or give back to stay within the budget
//
//   limit        where the area ends for placement: the part of the last run beyond it is not used. Runs between live
//                blocks are usable wherever they lie
//   end          the side of a run from which a block is cut
//
// The life of a block: Find a run, Take a piece of it (the block is live but may lack pages), let the caller make room
// in the budget, Back it with pages, use it, Free it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "block_index.h"
#include "pages.h"

namespace memmgr {

enum class End : uint8_t { kLow, kHigh };

class Heap {
 public:
  Heap(const PageOps& pages, char* base, uint64_t bytes, int unit_shift);

  // Best fit, committed runs first; nullptr when no run is long enough.
  Block* Find(uint64_t bytes, uint64_t limit) const;
  // Makes one end of a run a live block. block->holes pages of it still have to be committed. May throw
  // std::bad_alloc, and has then changed nothing.
  Block* Take(Block* run, uint64_t bytes, uint64_t requested_bytes, uint64_t limit, End end);
  // Commits what the block lacks. False when the system refuses; the caller then frees the block.
  bool Back(Block* block) { return block->holes == 0 || CommitHoles(block); }
  void Free(Block* block);

  Block* FindLive(uint64_t offset) const { return live_.Find(offset); }
  const Block* first() const { return first_; }
  const Block* last() const { return last_; }
  uint64_t blocks() const;  // live ones and runs

  // Gives up to `pages` spare pages back to the system; returns how many it did.
  uint64_t GiveBack(uint64_t pages);

  uint64_t bytes() const { return bytes_; }
  uint64_t live_blocks() const { return live_.size(); }
  uint64_t committed_pages() const { return committed_pages_; }
  uint64_t spare_pages() const { return spare_pages_; }
  uint64_t free_bytes() const { return free_bytes_ - hole_pages_ * pages_.page_bytes; }  // committed ones
  uint64_t LargestFreeBytes() const;
  uint64_t LongestRunBytes(uint64_t limit) const;  // addresses, with or without pages

  // Pieces in address order, a run split where its pages come and go. visit returns false to stop.
  using Visit = std::function<bool(uint64_t offset, uint64_t bytes, int state)>;
  bool Walk(const Visit& visit) const;
  // Empty when every invariant holds.
  std::string Check() const;

 private:
  struct PageSpan {
    uint64_t first, end;  // [first, end)
    uint64_t count() const { return end - first; }
  };
  PageSpan Touched(uint64_t offset, uint64_t bytes) const {
    return {offset >> page_shift_, (offset + bytes + pages_.page_bytes - 1) >> page_shift_};
  }
  PageSpan Whole(const Block* run) const {
    const uint64_t first = (run->offset + pages_.page_bytes - 1) >> page_shift_;
    const uint64_t end = (run->offset + run->bytes) >> page_shift_;
    return {first, end > first ? end : first};
  }
  RunIndex& Of(const Block* run) { return runs_[static_cast<int>(run->kind)]; }
  const RunIndex& Of(RunKind kind) const { return runs_[static_cast<int>(kind)]; }
  RunKind KindOf(const Block* run) const;
  Block* BestWithin(RunKind kind, uint64_t bytes, uint64_t limit) const;
  Block* SplitOff(Block* run, uint64_t at);
  void Publish(Block* run);   // enters a run into its index and the sums
  void Withdraw(Block* run);  // and takes it out, before it changes
  bool CommitHoles(Block* block);
  template <typename Visitor>
  bool WalkRun(const Block* run, const Visitor& visit) const;
  std::string CheckBlock(const Block* block) const;

  const PageOps& pages_;
  char* const base_;
  const uint64_t bytes_;
  const int unit_shift_;
  const int page_shift_;

  BlockPool pool_;
  BlockTable live_;
  RunIndex runs_[kRunKinds];
  PageMap map_;
  Block* first_;
  Block* last_;

  uint64_t free_bytes_ = 0;  // of all runs, holes included
  uint64_t hole_pages_ = 0;  // in runs
  uint64_t spare_pages_ = 0;
  uint64_t committed_pages_ = 0;
};

}  // namespace memmgr
