// Heap: the blocks of one area, in address order, and the pages under them. No lock and no budget: Arena has those.
//
// Words:
//   area         a part of the arena's range with its own unit: one for small blocks, one for all others, so that a
//                small block with a long life never splits the space that large ones need
//   unit         every size and offset is a multiple of it; a power of two
//   whole pages  the pages that lie completely inside a run; only they can be given back
//   spare pages  committed whole pages of runs: reuse without a page fault, or give back to stay within the budget
//
//   limit        where the area ends for placement: the part of the last run beyond it is not used. Runs between live
//                blocks are usable wherever they lie
//   spot         a run and the offset in it where a block is to begin
//   chunk        see pages.h: a block of at least one begins where one begins, if there are addresses enough
//
// The life of a block: Find a run, Take a piece of it (the block is live but may lack pages), let the caller make room
// in the budget, Back it with pages, use it, Free it.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "block_index.h"
#include "pages.h"

namespace memmgr {

struct Spot {
  Block* run = nullptr;  // nullptr: none
  uint64_t at = 0;
};

class Heap {
 public:
  Heap(const PageOps& pages, TouchedSets* sets, char* base, uint64_t bytes, int unit_shift);

  // Best fit, committed runs first; nullptr when no run is long enough.
  Block* Find(uint64_t bytes, uint64_t limit) const;
  // Where a block begins in a run.
  uint64_t LowerEnd(const Block* run, uint64_t limit, uint64_t bytes) const;
  // As Find, but only memory that no stream outside of `allowed` touched: a run, or pages of one that are not
  // committed.
  Spot FindWithin(uint64_t bytes, uint64_t limit, StreamMask allowed) const;
  // The tightest run of this pool that no stream outside of `allowed` touched.
  Spot FindPooled(uint8_t pool, uint64_t bytes, StreamMask allowed) const;
  // Makes a piece of a run a live block, with the run's streams (none, if all of its pages are new).
  // block->holes pages of it still have to be committed. May throw std::bad_alloc, and has then changed nothing.
  Block* Take(Spot spot, uint64_t bytes, uint64_t requested_bytes);
  // Commits the missing pages of the block. False when the system refuses; then no page was committed, and the caller
  // frees the block.
  bool Back(Block* block) { return block->holes == 0 || CommitHoles(block); }
  void Free(Block* block);
  // Before a block is given to this pool. May throw std::bad_alloc.
  void ReservePool(uint8_t pool);
  // The runs of the pool are for all streams again; `also` is added to the streams that touched them.
  void EndPool(uint8_t pool, StreamMask also);

  Block* FindLive(uint64_t offset) const { return live_.Find(offset); }
  const Block* first() const { return first_; }
  const Block* last() const { return last_; }
  // Visits every block, to change the streams that touched it.
  template <typename Visitor>
  void ForEach(const Visitor& visit) {
    for (Block* block = first_; block != nullptr; block = block->next) visit(block);
  }
  uint64_t blocks() const;  // live ones and runs

  // 0: pages are not moved. Otherwise the area begins where a chunk does.
  void SetChunk(uint64_t bytes, bool align) {
    chunk_pages_ = bytes >> page_shift_;
    align_ = align;
  }
  uint64_t chunk_bytes() const { return chunk_pages_ << page_shift_; }
  // Gives up to `pages` spare pages back to the system; returns how many it did.
  uint64_t GiveBack(uint64_t pages);
  // The same in two steps. Up to `pages` spare pages are away: in pieces that are chained by `left`, in front of
  // `list`. Each comes back, with or without its pages.
  Block* Detach(uint64_t pages, Block* list);
  void Reattach(Block* piece, bool decommitted);

  uint64_t bytes() const { return bytes_; }
  int unit_shift() const { return unit_shift_; }  // blocks lie at multiples of 1 << this
  uint64_t live_blocks() const { return live_.size(); }
  uint64_t committed_pages() const { return committed_pages_; }
  uint64_t spare_pages() const { return spare_pages_; }
  uint64_t pooled_bytes() const { return pooled_bytes_; }  // in runs of pools
  uint64_t away_pages() const { return away_pages_; }
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
  // Not a page of it is committed. Pages lose their memory only when no stream touches them any more.
  bool IsNew(const Block* block) const { return block->holes == Touched(block->offset, block->bytes).count(); }
  const RunIndex& Of(RunKind kind) const { return runs_[static_cast<int>(kind)]; }
  RunKind KindOf(const Block* run) const;
  Block* BestWithin(RunKind kind, uint64_t bytes, uint64_t limit) const;
  Block* FewestHoles(uint64_t bytes, uint64_t limit) const;
  Block* SplitOff(Block* run, uint64_t at);
  void Publish(Block* run);   // enters a run into its index and the sums
  void Withdraw(Block* run);  // and takes it out, before it changes
  void Coalesce(Block* run);  // publishes it together with the runs beside it
  bool Allowed(const Block* run, StreamMask allowed) const { return (sets_->Mask(run->touched) & ~allowed) == 0; }
  Block* BestAllowed(const RunIndex& index, uint64_t bytes, uint64_t limit, StreamMask allowed) const;
  // The first of so many pages next to each other that are not committed; the end of the run when there are none.
  uint64_t NewPages(const Block* run, uint64_t pages, uint64_t limit) const;
  bool CommitHoles(Block* block);
  // Gives back multiples of `step` pages of the run, at most `most`; returns how many.
  uint64_t GiveBackOf(Block* run, uint64_t step, uint64_t most);
  template <typename Visitor>
  bool WalkRun(const Block* run, const Visitor& visit) const;
  std::string CheckBlock(const Block* block) const;

  const PageOps& pages_;
  TouchedSets* const sets_;
  char* const base_;
  const uint64_t bytes_;
  const int unit_shift_;
  const int page_shift_;

  BlockPool pool_;
  BlockTable live_;
  RunIndex runs_[kRunKinds];
  std::array<std::unique_ptr<RunIndex>, kAway> pools_;  // by number; made at the first block
  PageMap map_;
  Block* first_;
  Block* last_;

  uint64_t chunk_pages_ = 0;
  bool align_ = false;
  uint64_t free_bytes_ = 0;  // of all runs, holes included
  uint64_t hole_pages_ = 0;  // in runs
  uint64_t spare_pages_ = 0;
  uint64_t committed_pages_ = 0;
  uint64_t pooled_bytes_ = 0;  // in the runs of pools: neither free nor spare
  uint64_t away_pages_ = 0;
  uint64_t odd_blocks_ = 0;  // runs of pools, and runs whose pages are being given back
};

}  // namespace memmgr
