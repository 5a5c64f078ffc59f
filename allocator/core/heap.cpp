// Long: one class, whose runs, blocks and pages are one set of sums.
#include "heap.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <new>
#include <utility>

#include "ordering.h"
#include "window.h"

namespace memmgr {
namespace {

// To a multiple of `step`.
uint64_t Up(uint64_t page, uint64_t step) { return (page + step - 1) / step * step; }
uint64_t Down(uint64_t page, uint64_t step) { return page / step * step; }

}  // namespace

Heap::Heap(const PageOps& pages, TouchedSets* sets, char* base, uint64_t bytes, int unit_shift)
    : pages_(pages),
      sets_(sets),
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

inline void Heap::Publish(Block* run) {
  run->kind = KindOf(run);
  if (run->touched != 0 && IsNew(run)) run->touched = 0;
  if (run->pool != 0) {
    pools_[run->pool]->Insert(run);
    pooled_bytes_ += run->bytes;
    ++odd_blocks_;
    return;
  }
  runs_[static_cast<int>(run->kind)].Insert(run);
  free_bytes_ += run->bytes;
  hole_pages_ += run->holes;
  spare_pages_ += Whole(run).count() - run->holes;
}

inline void Heap::Withdraw(Block* run) {
  if (run->pool != 0) {
    pools_[run->pool]->Erase(run);
    pooled_bytes_ -= run->bytes;
    --odd_blocks_;
    return;
  }
  runs_[static_cast<int>(run->kind)].Erase(run);
  free_bytes_ -= run->bytes;
  hole_pages_ -= run->holes;
  spare_pages_ -= Whole(run).count() - run->holes;
}

// ---- find ------------------------------------------------------------------------------------------------------

Block* Heap::BestWithin(RunKind kind, uint64_t bytes, uint64_t limit) const {
  Block* run = Of(kind).BestFit(bytes);
  if (run == nullptr || run != last_ || run->offset + bytes <= limit) return run;
  return Of(kind).BestFit(run->bytes, run->offset + 1);
}

Block* Heap::Find(uint64_t bytes, uint64_t limit) const {
  Block* run = Tighter(BestWithin(RunKind::kFragment, bytes, limit), BestWithin(RunKind::kCommitted, bytes, limit));
  if (run != nullptr) return run;
  run = FewestHoles(bytes, limit);
  if (run != nullptr) return run;
  // The untouched end of the area is the longest of these, so best fit reaches up there last.
  return Tighter(BestWithin(RunKind::kMixed, bytes, limit), BestWithin(RunKind::kHole, bytes, limit));
}

// Where blocks are aligned each has holes behind it, and so has the rest of its run. A block of its length finds all
// pages there, whichever run is the shortest. Null: all runs that were searched have as many holes as pages.
Block* Heap::FewestHoles(uint64_t bytes, uint64_t limit) const {
  constexpr int kLooks = 16;
  const RunIndex& mixed = Of(RunKind::kMixed);
  Block* best = nullptr;
  uint64_t fewest = bytes >> page_shift_;
  Block* run = mixed.BestFit(bytes);
  for (int i = 0; i < kLooks && run != nullptr; ++i) {
    if (run != last_ || run->offset + bytes <= limit) {
      const PageSpan pages = Touched(LowerEnd(run, limit, bytes), bytes);
      const uint64_t holes = map_.CountHoles(pages.first, pages.end);
      if (holes < fewest) {
        best = run;
        fewest = holes;
        if (holes == 0) break;
      }
    }
    run = mixed.BestFit(run->bytes, run->offset + 1);
  }
  return best;
}

uint64_t Heap::LowerEnd(const Block* run, uint64_t limit, uint64_t bytes) const {
  if (!align_ || bytes >> page_shift_ < chunk_pages_) return run->offset;
  const uint64_t first = Up(Whole(run).first, chunk_pages_) << page_shift_;
  const uint64_t run_end = run->offset + run->bytes;
  return first + bytes <= (run == last_ ? std::min(run_end, limit) : run_end) ? first : run->offset;
}

Block* Heap::BestAllowed(const RunIndex& index, uint64_t bytes, uint64_t limit, StreamMask allowed) const {
  Block* run = index.BestFit(bytes);
  while (run != nullptr && (!Allowed(run, allowed) || (run == last_ && run->offset + bytes > limit)))
    run = index.BestFit(run->bytes, run->offset + 1);
  return run;
}

uint64_t Heap::NewPages(const Block* run, uint64_t pages, uint64_t limit) const {
  const PageSpan whole = Whole(run);
  const uint64_t none = run->offset + run->bytes;
  for (uint64_t at = whole.first;;) {
    at = map_.Next(at, whole.end, false);
    const uint64_t end = map_.Next(at, whole.end, true);
    if (at == whole.end || (run == last_ && (at + pages) << page_shift_ > limit)) return none;
    if (end - at >= pages) return at << page_shift_;
    at = end;
  }
}

Spot Heap::FindWithin(uint64_t bytes, uint64_t limit, StreamMask allowed) const {
  for (const auto& [one, other] :
       {std::pair{RunKind::kFragment, RunKind::kCommitted}, {RunKind::kMixed, RunKind::kHole}}) {
    Block* run = Tighter(BestAllowed(Of(one), bytes, limit, allowed), BestAllowed(Of(other), bytes, limit, allowed));
    if (run != nullptr) return {run, run->offset};
  }
  const uint64_t pages = (bytes + pages_.page_bytes - 1) >> page_shift_;
  for (const RunKind kind : {RunKind::kMixed, RunKind::kHole}) {
    for (Block* run = Of(kind).BestFit(bytes); run != nullptr; run = Of(kind).BestFit(run->bytes, run->offset + 1)) {
      const uint64_t at = NewPages(run, pages, limit);
      if (at != run->offset + run->bytes) return {run, at};
    }
  }
  return {};
}

Spot Heap::FindPooled(uint8_t pool, uint64_t bytes, StreamMask allowed) const {
  if (pools_[pool] == nullptr) return {};
  Block* run = BestAllowed(*pools_[pool], bytes, bytes_, allowed);
  return {run, run != nullptr ? run->offset : 0};
}

// ---- take, back, free --------------------------------------------------------------------------------------------

Block* Heap::Take(Spot spot, uint64_t bytes, uint64_t requested_bytes) {
  live_.ReserveOne();
  pool_.Reserve();
  Block* run = spot.run;
  Withdraw(run);
  const bool holey = run->holes > 0;
  if (spot.at > run->offset) {
    Block* upper = SplitOff(run, spot.at);
    if (holey) {
      // A page that both touch belongs to the block.
      const PageSpan below = Whole(run);
      const uint64_t left = map_.CountHoles(below.first, below.end);
      upper->holes = static_cast<uint32_t>(run->holes - left);
      run->holes = static_cast<uint32_t>(left);
    }
    Publish(run);
    run = upper;
  }
  if (run->bytes > bytes) {
    Block* rest = SplitOff(run, run->offset + bytes);
    if (holey) {
      // Here too: the rest keeps the holes among its whole pages.
      const PageSpan touched = Touched(run->offset, bytes);
      const uint64_t taken = map_.CountHoles(touched.first, touched.end);
      rest->holes = static_cast<uint32_t>(run->holes - taken);
      run->holes = static_cast<uint32_t>(taken);
    }
    Publish(rest);
  }
  if (run->touched != 0 && IsNew(run)) run->touched = 0;
  run->slack = static_cast<uint16_t>(bytes - requested_bytes);
  run->home = 0;
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
  upper->touched = Order<"split.touched">([&] { return run->touched; });
  upper->times = Order<"split.time">([&] { return run->times; });
  upper->pool = run->pool;
  upper->previous = run;
  upper->next = run->next;
  (upper->next != nullptr ? upper->next->previous : last_) = upper;
  run->next = upper;
  run->bytes = at - run->offset;
  return upper;
}

// All or nothing: the map changes when every hole has its pages.
bool Heap::CommitHoles(Block* block) {
  const PageSpan touched = Touched(block->offset, block->bytes);
  const auto each_hole = [&](uint64_t until, auto&& body) {
    for (uint64_t at = touched.first;;) {
      const uint64_t first = map_.Next(at, until, false);
      if (first >= until) return until;
      at = map_.Next(first, until, true);
      if (!body(base_ + (first << page_shift_), (at - first) << page_shift_)) return first;
    }
  };
  const uint64_t refused =
      each_hole(touched.end, [&](char* at, uint64_t bytes) { return pages_.commit(pages_.user, at, bytes) == 0; });
  if (refused < touched.end) {
    each_hole(refused, [&](char* at, uint64_t bytes) { return pages_.decommit(pages_.user, at, bytes), true; });
    return false;
  }
  map_.Set(touched.first, touched.end);
  committed_pages_ += block->holes;
  block->holes = 0;
  return true;
}

void Heap::Free(Block* block) {
  live_.Erase(block->offset);
  Coalesce(block);
}

// Before their sets are joined.
static void JoinTimes(Block* run, const Block& other) {
  if (other.touched == 0) return;
  if (run->touched == 0)
    run->times = other.times;
  else
    Order<"coalesce.time">([&] { return run->times.Raise(other.times), 0; });
}

void Heap::Coalesce(Block* block) {
  block->live = false;
  Block* before = block->previous;
  if (before != nullptr && !before->live && before->pool == block->pool) {
    Withdraw(before);
    before->bytes += block->bytes;
    before->holes += block->holes;
    JoinTimes(before, *block);
    before->touched = Order<"coalesce.touched">([&] { return sets_->Union(before->touched, block->touched); });
    before->next = block->next;
    (block->next != nullptr ? block->next->previous : last_) = before;
    pool_.Return(block);
    block = before;
  }
  Block* after = block->next;
  if (after != nullptr && !after->live && after->pool == block->pool) {
    Withdraw(after);
    block->bytes += after->bytes;
    block->holes += after->holes;
    JoinTimes(block, *after);
    block->touched = Order<"coalesce.touched">([&] { return sets_->Union(block->touched, after->touched); });
    block->next = after->next;
    (after->next != nullptr ? after->next->previous : last_) = block;
    pool_.Return(after);
  }
  Publish(block);
}

// ---- pools -------------------------------------------------------------------------------------------------------

void Heap::ReservePool(uint8_t pool) {
  if (pools_[pool] == nullptr) pools_[pool] = std::make_unique<RunIndex>(unit_shift_);
}

void Heap::EndPool(uint8_t pool, StreamMask also) {
  if (pools_[pool] == nullptr) return;
  const TouchedId also_id = sets_->Of(also);
  while (Block* run = pools_[pool]->Largest()) {
    Withdraw(run);
    run->pool = 0;
    run->touched = sets_->Union(run->touched, also_id);
    run->times.at.fill(kTail);
    Coalesce(run);
  }
}

// ---- pages -------------------------------------------------------------------------------------------------------

// First whole chunks, as long as there are any and one is wanted, so that they can be moved; then single pages. Runs
// with holes are no fast reuse, so they lose the rest first.
uint64_t Heap::GiveBack(uint64_t pages) {
  uint64_t given = 0;
  for (const uint64_t step : {chunk_pages_, uint64_t{1}}) {
    if (step == 0) continue;
    for (const RunKind kind : {RunKind::kMixed, RunKind::kCommitted}) {
      Block* run = Of(kind).Largest();
      while (run != nullptr && pages - given >= step && run->bytes >> page_shift_ >= step) {
        Block* const next = Of(kind).Below(run->bytes, run->offset);
        given += GiveBackOf(run, step, pages - given);
        run = next;
      }
    }
  }
  return given;
}

// From the upper end of the run on, because blocks are placed at its lower end.
uint64_t Heap::GiveBackOf(Block* run, uint64_t step, uint64_t most) {
  uint64_t given = 0;
  const PageSpan whole = Whole(run);
  for (uint64_t end = whole.end; most - given >= step;) {
    end = map_.Previous(whole.first, end, true);
    if (end == whole.first) break;
    const uint64_t begin = map_.Previous(whole.first, end, false);
    const uint64_t low = Up(begin, step), top = Down(end, step);
    end = begin;
    if (low >= top) continue;
    const uint64_t first = std::max(low, top - std::min(top, Down(most - given, step)));
    if (pages_.decommit(pages_.user, base_ + (first << page_shift_), (top - first) << page_shift_) != 0) break;
    if (given == 0) Withdraw(run);
    map_.Clear(first, top);
    run->holes += static_cast<uint32_t>(top - first);
    committed_pages_ -= top - first;
    given += top - first;
  }
  if (given > 0) Publish(run);
  return given;
}

Block* Heap::Detach(uint64_t pages, Block* list) {
  for (const RunKind kind : {RunKind::kMixed, RunKind::kCommitted}) {  // in the order of GiveBack
    while (pages > 0) {
      Block* run = Of(kind).Largest();
      if (run == nullptr) break;
      try {
        pool_.Reserve();
      } catch (const std::bad_alloc&) {
        return list;
      }
      Withdraw(run);
      const PageSpan whole = Whole(run);
      const uint64_t end = map_.Previous(whole.first, whole.end, true);
      const uint64_t first = std::max(map_.Previous(whole.first, end, false), end - std::min(end, pages));
      if (end << page_shift_ < run->offset + run->bytes) {
        Block* upper = SplitOff(run, end << page_shift_);
        upper->holes = static_cast<uint32_t>(whole.end - end);
        run->holes -= upper->holes;
        Publish(upper);
      }
      if (first << page_shift_ > run->offset) {
        Block* piece = SplitOff(run, first << page_shift_);
        Publish(run);
        run = piece;
      }
      run->live = true;
      run->pool = kAway;
      run->cost = kPinnedCost;
      run->left = list;
      list = run;
      pages -= end - first;
      away_pages_ += end - first;
      ++odd_blocks_;
    }
  }
  return list;
}

void Heap::Reattach(Block* piece, bool decommitted) {
  const PageSpan whole = Whole(piece);
  away_pages_ -= whole.count();
  --odd_blocks_;
  if (decommitted) {
    map_.Clear(whole.first, whole.end);
    committed_pages_ -= whole.count();
    piece->holes = static_cast<uint32_t>(whole.count());
    piece->touched = 0;
  }
  piece->pool = 0;
  Coalesce(piece);
}

// ---- look --------------------------------------------------------------------------------------------------------

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
    const bool go_on = block->holes == 0
                           ? visit(block->offset, block->bytes, block->live && block->pool != kAway ? 1 : 0)
                           : WalkRun(block, visit);
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
  uint64_t count = live_.size() + odd_blocks_;
  for (const RunIndex& index : runs_) count += index.size();
  return count;
}

uint64_t Heap::LongestRunBytes(uint64_t limit) const {
  uint64_t longest = 0;
  if (!last_->live && last_->pool == 0 && last_->offset < limit)
    longest = std::min(last_->bytes, limit - last_->offset);
  for (const RunIndex& index : runs_) {
    const Block* run = index.Largest(last_);
    if (run != nullptr) longest = std::max(longest, run->bytes);
  }
  return longest;
}

std::string Heap::CheckBlock(const Block* block) const {
  const std::string at = " at offset " + std::to_string(block->offset);
  if (block->bytes == 0 || (block->bytes & ((uint64_t{1} << unit_shift_) - 1)) != 0) return "odd size" + at;
  if (block->live && block->pool == kAway) {
    const PageSpan whole = Whole(block);
    if (whole.count() << page_shift_ != block->bytes || block->holes != 0) return "what is away has odd pages" + at;
    return "";
  }
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
  if (block->pool != 0 && block->holes != 0) return "a run of a pool has holes" + at;
  const RunIndex& index = block->pool == 0 ? Of(block->kind) : *pools_[block->pool];
  const Block* fit = index.BestFit(block->bytes);
  if (fit == nullptr || fit->bytes != block->bytes || fit->offset > block->offset) return "best fit misses a run" + at;
  return "";
}

std::string Heap::Check() const {
  uint64_t end = 0, live = 0, runs = 0, free = 0, holes = 0, spare = 0, pooled = 0, odd = 0, away = 0;
  const Block* before = nullptr;
  for (const Block* block = first_; block != nullptr; before = block, block = block->next) {
    const std::string at = " at offset " + std::to_string(block->offset);
    if (block->offset != end) return "a gap or an overlap" + at;
    if (block->previous != before) return "the address list is broken" + at;
    if (before != nullptr && !before->live && !block->live && before->pool == block->pool) return "two runs touch" + at;
    if (std::string wrong = CheckBlock(block); !wrong.empty()) return wrong;
    end += block->bytes;
    if (block->live && block->pool == kAway) {
      ++odd;
      away += Whole(block).count();
    } else if (block->live) {
      ++live;
    } else if (block->pool != 0) {
      ++odd;
      pooled += block->bytes;
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
  if (pooled != pooled_bytes_ || odd != odd_blocks_ || away != away_pages_) return "pools or pages away are miscounted";
  const uint64_t pages = bytes_ >> page_shift_;
  if (pages - map_.CountHoles(0, pages) != committed_pages_) return "committed pages are miscounted";
  return "";
}

}  // namespace memmgr
