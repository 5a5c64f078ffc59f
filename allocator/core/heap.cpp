#include "heap.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "window.h"

namespace memmgr {

Heap::Heap(const PageOps& pages, char* base, uint64_t bytes, int unit_shift)
    : pages_(pages),
      base_(base),
      bytes_(bytes),
      unit_shift_(unit_shift),
      page_shift_(std::countr_zero(static_cast<uint64_t>(pages.page_bytes))),
      runs_{RunIndex(unit_shift), RunIndex(unit_shift), RunIndex(unit_shift), RunIndex(unit_shift)},
      map_(bytes >> page_shift_),
      first_(pool_.Take()),
      last_(first_) {
  first_->bytes = bytes;
  first_->holes = static_cast<uint32_t>(bytes >> page_shift_);
  Publish(first_);
}

RunKind Heap::KindOf(const Block* run) const {
  const uint64_t whole = Whole(run).count();
  if (whole == 0) return RunKind::kFragment;
  if (run->holes == 0) return RunKind::kCommitted;
  return run->holes == whole ? RunKind::kHole : RunKind::kMixed;
}

void Heap::Publish(Block* run) {
  run->kind = KindOf(run);
  Of(run).Insert(run);
  free_bytes_ += run->bytes;
  hole_pages_ += run->holes;
  spare_pages_ += Whole(run).count() - run->holes;
}

void Heap::Withdraw(Block* run) {
  Of(run).Erase(run);
  free_bytes_ -= run->bytes;
  hole_pages_ -= run->holes;
  spare_pages_ -= Whole(run).count() - run->holes;
}

Block* Heap::BestWithin(RunKind kind, uint64_t bytes, uint64_t limit) const {
  Block* run = Of(kind).BestFit(bytes);
  if (run == nullptr || run != last_ || run->offset + bytes <= limit) return run;
  return Of(kind).BestFit(run->bytes, run->offset + 1);
}

Block* Heap::Find(uint64_t bytes, uint64_t limit) const {
  Block* run = Tighter(BestWithin(RunKind::kFragment, bytes, limit), BestWithin(RunKind::kCommitted, bytes, limit));
  if (run != nullptr) return run;
  // The untouched end of the area is the longest of these, so best fit reaches up there last.
  return Tighter(BestWithin(RunKind::kMixed, bytes, limit), BestWithin(RunKind::kHole, bytes, limit));
}

Block* Heap::Take(Block* run, uint64_t bytes, uint64_t requested_bytes, uint64_t limit, End end) {
  live_.ReserveOne();
  pool_.Reserve();
  Withdraw(run);
  const bool holey = run->kind == RunKind::kHole || run->kind == RunKind::kMixed;
  const uint64_t run_end = run->offset + run->bytes;
  if (end == End::kHigh) {
    // Below the block stays a run, and beyond the limit another one. (Sizes are multiples of the unit: so are rests.)
    const uint64_t top = run == last_ ? std::min(run_end, std::max(limit, run->offset + bytes)) : run_end;
    if (top - bytes > run->offset) {
      Block* upper = SplitOff(run, top - bytes);
      if (holey) {
        // A page that both touch belongs to the block here too.
        const PageSpan below = Whole(run);
        const uint64_t left = map_.CountHoles(below.first, below.end);
        upper->holes = static_cast<uint32_t>(run->holes - left);
        run->holes = static_cast<uint32_t>(left);
      }
      Publish(run);
      run = upper;
    }
  }
  if (run->bytes > bytes) {
    Block* rest = SplitOff(run, run->offset + bytes);
    if (holey) {
      // A page that both touch belongs to the block: the rest keeps the holes among its whole pages.
      const PageSpan touched = Touched(run->offset, bytes);
      const uint64_t taken = map_.CountHoles(touched.first, touched.end);
      rest->holes = static_cast<uint32_t>(run->holes - taken);
      run->holes = static_cast<uint32_t>(taken);
    }
    Publish(rest);
  }
  run->slack = static_cast<uint32_t>(bytes - requested_bytes);
  run->owner = nullptr;
  run->last_access = 0;
  run->cost = kPinnedCost;
  run->live = true;
  live_.Insert(run);
  return run;
}

// The part of a withdrawn run from `at` on becomes a block of its own, not published; its holes are the caller's
// matter.
Block* Heap::SplitOff(Block* run, uint64_t at) {
  Block* upper = pool_.Take();
  upper->offset = at;
  upper->bytes = run->offset + run->bytes - at;
  upper->previous = run;
  upper->next = run->next;
  (upper->next != nullptr ? upper->next->previous : last_) = upper;
  run->next = upper;
  run->bytes = at - run->offset;
  return upper;
}

bool Heap::CommitHoles(Block* block) {
  const PageSpan touched = Touched(block->offset, block->bytes);
  for (uint64_t at = touched.first; block->holes > 0;) {
    const uint64_t first = map_.Next(at, touched.end, false);
    const uint64_t end = map_.Next(first, touched.end, true);
    if (pages_.commit(base_ + (first << page_shift_), (end - first) << page_shift_) != 0) return false;
    map_.Set(first, end);
    committed_pages_ += end - first;
    block->holes -= static_cast<uint32_t>(end - first);
    at = end;
  }
  return true;
}

void Heap::Free(Block* block) {
  live_.Erase(block->offset);
  block->live = false;
  Block* before = block->previous;
  if (before != nullptr && !before->live) {
    Withdraw(before);
    before->bytes += block->bytes;
    before->holes += block->holes;
    before->next = block->next;
    (block->next != nullptr ? block->next->previous : last_) = before;
    pool_.Return(block);
    block = before;
  }
  Block* after = block->next;
  if (after != nullptr && !after->live) {
    Withdraw(after);
    block->bytes += after->bytes;
    block->holes += after->holes;
    block->next = after->next;
    (after->next != nullptr ? after->next->previous : last_) = block;
    pool_.Return(after);
  }
  Publish(block);
}

uint64_t Heap::GiveBack(uint64_t pages) {
  uint64_t given = 0;
  // Runs that have holes already are no fast reuse any more, so they lose the rest first; and the upper end of a run
  // first, because blocks are placed at its lower end.
  for (const RunKind kind : {RunKind::kMixed, RunKind::kCommitted}) {
    while (given < pages) {
      Block* run = Of(kind).Largest();
      if (run == nullptr) break;
      Withdraw(run);
      const PageSpan whole = Whole(run);
      bool refused = false;
      for (uint64_t end = whole.end; given < pages && !refused;) {
        end = map_.Previous(whole.first, end, true);
        if (end == whole.first) break;
        const uint64_t first = std::max(map_.Previous(whole.first, end, false), end - std::min(end, pages - given));
        refused = pages_.decommit(base_ + (first << page_shift_), (end - first) << page_shift_) != 0;
        if (refused) break;
        map_.Clear(first, end);
        run->holes += static_cast<uint32_t>(end - first);
        committed_pages_ -= end - first;
        given += end - first;
        end = first;
      }
      Publish(run);
      if (refused) return given;
    }
  }
  return given;
}

// A run with holes, piece by piece. The part of a page that it shares with a live neighbour is committed, and joins the
// piece beside it.
template <typename Visitor>
bool Heap::WalkRun(const Block* run, const Visitor& visit) const {
  const PageSpan whole = Whole(run);
  const uint64_t end = run->offset + run->bytes;
  uint64_t start = run->offset;
  bool committed = start < whole.first << page_shift_ || map_.Next(whole.first, whole.end, false) > whole.first;
  for (uint64_t page = whole.first; start < end; committed = !committed) {
    page = map_.Next(page, whole.end, !committed);
    const bool last = page == whole.end && (committed || whole.end << page_shift_ == end);
    const uint64_t stop = last ? end : page << page_shift_;
    if (!visit(start, stop - start, committed ? 0 : 2)) return false;
    start = stop;
  }
  return true;
}

bool Heap::Walk(const Visit& visit) const {
  for (const Block* block = first_; block != nullptr; block = block->next) {
    const bool go_on =
        block->holes == 0 ? visit(block->offset, block->bytes, block->live ? 1 : 0) : WalkRun(block, visit);
    if (!go_on) return false;
  }
  return true;
}

uint64_t Heap::LargestFreeBytes() const {
  uint64_t largest = 0;
  for (const RunKind kind : {RunKind::kFragment, RunKind::kCommitted}) {
    const Block* run = Of(kind).Largest();
    if (run != nullptr) largest = std::max(largest, run->bytes);
  }
  for (const Block* block = first_; block != nullptr; block = block->next) {
    if (block->holes == 0) continue;
    WalkRun(block, [&](uint64_t, uint64_t piece_bytes, int state) {
      if (state == 0) largest = std::max(largest, piece_bytes);
      return true;
    });
  }
  return largest;
}

uint64_t Heap::blocks() const {
  uint64_t count = live_.size();
  for (const RunIndex& index : runs_) count += index.size();
  return count;
}

uint64_t Heap::LongestRunBytes(uint64_t limit) const {
  uint64_t longest = 0;
  if (!last_->live && last_->offset < limit) longest = std::min(last_->bytes, limit - last_->offset);
  for (const RunIndex& index : runs_) {
    const Block* run = index.Largest(last_);
    if (run != nullptr) longest = std::max(longest, run->bytes);
  }
  return longest;
}

std::string Heap::CheckBlock(const Block* block) const {
  const std::string at = " at offset " + std::to_string(block->offset);
  if (block->bytes == 0 || (block->bytes & ((uint64_t{1} << unit_shift_) - 1)) != 0) return "odd size" + at;
  if (block->live) {
    if (live_.Find(block->offset) != block) return "a live block is not in the table" + at;
    const PageSpan touched = Touched(block->offset, block->bytes);
    if (block->holes != 0 || map_.CountHoles(touched.first, touched.end) != 0) return "a live block has holes" + at;
    if (block->slack > block->bytes) return "a block is shorter than was asked" + at;
    if (block->owner == nullptr ? block->cost >= 0 : std::isnan(block->cost)) return "a block has an odd price" + at;
    return "";
  }
  const PageSpan whole = Whole(block);
  if (map_.CountHoles(whole.first, whole.end) != block->holes) return "a run's holes are miscounted" + at;
  if (block->kind != KindOf(block)) return "a run is in the wrong index" + at;
  const Block* fit = Of(block->kind).BestFit(block->bytes);
  if (fit == nullptr || fit->bytes != block->bytes || fit->offset > block->offset) return "best fit misses a run" + at;
  return "";
}

std::string Heap::Check() const {
  uint64_t end = 0, live = 0, runs = 0, free = 0, holes = 0, spare = 0;
  const Block* before = nullptr;
  for (const Block* block = first_; block != nullptr; before = block, block = block->next) {
    const std::string at = " at offset " + std::to_string(block->offset);
    if (block->offset != end) return "a gap or an overlap" + at;
    if (block->previous != before) return "the address list is broken" + at;
    if (before != nullptr && !before->live && !block->live) return "two runs touch" + at;
    if (std::string wrong = CheckBlock(block); !wrong.empty()) return wrong;
    end += block->bytes;
    if (block->live) {
      ++live;
    } else {
      ++runs;
      free += block->bytes;
      holes += block->holes;
      spare += Whole(block).count() - block->holes;
    }
  }
  if (end != bytes_ || before != last_) return "the blocks do not tile the area";
  if (live != live_.size()) return "the table has entries that are no block";
  uint64_t indexed = 0;
  for (const RunIndex& index : runs_) indexed += index.size();
  if (indexed != runs) return "the indexes do not hold exactly the runs";
  if (free != free_bytes_ || holes != hole_pages_ || spare != spare_pages_) return "the sums over the runs are wrong";
  const uint64_t pages = bytes_ >> page_shift_;
  if (pages - map_.CountHoles(0, pages) != committed_pages_) return "committed pages are miscounted";
  return "";
}

}  // namespace memmgr
