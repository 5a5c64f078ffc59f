#include "meter.h"

#include <algorithm>

namespace memmgr {
namespace {

constexpr size_t kSmallLimit = 8 << 10;  // of core/arena.h: a block at most this large lies in the small-block area

}  // namespace

Meter::Meter(mm_device* device, uint64_t least_total_bytes) : device_(device) {
  uint64_t free_bytes = 0;
  mm_device_memory(device_, &free_bytes, &total_bytes_);
  total_bytes_ = std::max(total_bytes_, least_total_bytes);
}

// ---- blocks ----------------------------------------------------------------------------------------------------

void Meter::Allocated(const void* p, size_t requested_bytes) {
  const auto bytes = static_cast<int64_t>(mm_arena_block_bytes(arena(), p));
  const auto requested = static_cast<int64_t>(requested_bytes);
  std::lock_guard hold(lock_);
  const int64_t peak = rows_[kAll].bytes.peak;
  for (Pool pool : {kAll, requested_bytes <= kSmallLimit ? kSmall : kLarge}) {
    rows_[pool].blocks.Add(1);
    rows_[pool].bytes.Add(bytes);
    rows_[pool].requested.Add(requested);
  }
  // Pages are made when blocks need them: nearly always at a new peak.
  if (rows_[kAll].bytes.peak > peak) SamplePages();
}

void Meter::Freed(const void* p) {
  size_t requested = 0;
  const size_t bytes = mm_arena_block(arena(), p, &requested);
  if (bytes == 0) return;
  std::lock_guard hold(lock_);
  for (Pool pool : {kAll, requested <= kSmallLimit ? kSmall : kLarge}) {
    rows_[pool].blocks.Take(1);
    rows_[pool].bytes.Take(static_cast<int64_t>(bytes));
    rows_[pool].requested.Take(static_cast<int64_t>(requested));
  }
}

void Meter::Failed() {
  std::lock_guard hold(lock_);
  ++out_of_memory_;
}

void Meter::Retried() {
  std::lock_guard hold(lock_);
  ++retries_;
}

int64_t Meter::live_bytes() {
  std::lock_guard hold(lock_);
  return rows_[kAll].bytes.current;
}

// ---- figures ---------------------------------------------------------------------------------------------------

void Meter::SamplePages() {
  mm_arena_stats arena_now;
  mm_arena_stats_get(arena(), &arena_now);
  mm_device_stats device_now;
  mm_device_stats_get(device_, &device_now);
  const int64_t grown = static_cast<int64_t>(arena_now.committed_bytes) - reserved_.current;
  grown >= 0 ? reserved_.Add(grown) : reserved_.Take(-grown);
  // The arena keeps a peak of its own, which a budget's passes reset: it counts once it differs from its value when
  // the meter's was reset.
  const auto arena_peak = static_cast<int64_t>(arena_now.committed_peak_bytes);
  if (arena_peak != arena_peak_at_reset_) {
    arena_peak_at_reset_ = -1;
    reserved_.peak = std::max(reserved_.peak, arena_peak);
  }
  maps_ = device_now.maps;
  unmaps_ = device_now.unmaps;
  pages_peak_ = std::max(pages_peak_, static_cast<int64_t>(maps_ - unmaps_));
}

MemoryStats Meter::Stats() {
  std::lock_guard hold(lock_);
  SamplePages();
  MemoryStats out{};
  for (int pool = 0; pool < kPools; ++pool) {
    out.blocks[pool] = rows_[pool].blocks.Read();
    out.bytes[pool] = rows_[pool].bytes.Read();
    out.requested_bytes[pool] = rows_[pool].requested.Read();
  }
  const auto made = static_cast<int64_t>(maps_ - maps_at_reset_);
  const auto given_back = static_cast<int64_t>(unmaps_ - unmaps_at_reset_);
  out.pages = {static_cast<int64_t>(maps_ - unmaps_), pages_peak_, made, given_back};
  out.reserved_bytes = reserved_.Read();
  out.out_of_memory = out_of_memory_;
  out.retries = retries_;
  mm_device_stats device_now;
  mm_device_stats_get(device_, &device_now);
  out.synchronizations = static_cast<int64_t>(device_now.synchronizations);
  return out;
}

template <typename Act>
void Meter::ForEach(Act act) {
  for (Row& row : rows_) {
    act(row.blocks);
    act(row.bytes);
    act(row.requested);
  }
}

void Meter::ResetPeaks() {
  std::lock_guard hold(lock_);
  ForEach([](Tally& tally) { tally.ResetPeak(); });
  SamplePages();
  reserved_.ResetPeak();
  pages_peak_ = static_cast<int64_t>(maps_ - unmaps_);
  mm_arena_stats arena_now;
  mm_arena_stats_get(arena(), &arena_now);
  arena_peak_at_reset_ = static_cast<int64_t>(arena_now.committed_peak_bytes);
}

void Meter::ResetSums() {
  std::lock_guard hold(lock_);
  ForEach([](Tally& tally) { tally.ResetSums(); });
  SamplePages();
  reserved_.ResetSums();
  maps_at_reset_ = maps_;
  unmaps_at_reset_ = unmaps_;
  out_of_memory_ = retries_ = 0;
}

// ---- limits ----------------------------------------------------------------------------------------------------

uint64_t Meter::Allowed() const {
  return fraction_ >= 1 ? MM_UNLIMITED : static_cast<uint64_t>(fraction_ * static_cast<double>(total_bytes_));
}

void Meter::Limit() { mm_arena_set_budget(arena(), std::min(budget_bytes_, Allowed())); }

void Meter::SetBudget(uint64_t budget_bytes) {
  std::lock_guard hold(lock_);
  budget_bytes_ = budget_bytes;
  Limit();
}

void Meter::SetFraction(double fraction) {
  std::lock_guard hold(lock_);
  fraction_ = fraction;
  Limit();
}

double Meter::fraction() {
  std::lock_guard hold(lock_);
  return fraction_;
}

uint64_t Meter::allowed_bytes() {
  std::lock_guard hold(lock_);
  return Allowed();
}

// ---- the snapshot ----------------------------------------------------------------------------------------------

std::vector<Segment> Meter::Segments() const {
  struct Walk {
    uint64_t base;
    std::vector<Segment> segments;
  } walk{reinterpret_cast<uint64_t>(mm_arena_base(arena())), {}};
  constexpr int kLive = 1, kNoMemory = 2;
  mm_arena_walk(
      arena(),
      [](void* user, uint64_t offset, uint64_t bytes, int state) {
        if (state == kNoMemory) return 0;
        auto* w = static_cast<Walk*>(user);
        const uint64_t address = w->base + offset;
        if (w->segments.empty() || w->segments.back().address + w->segments.back().bytes != address)
          w->segments.push_back({address, 0, 0, 0, {}});
        Segment& segment = w->segments.back();
        segment.bytes += bytes;
        segment.pieces.push_back({address, bytes, 0, state == kLive});
        if (state == kLive) segment.live_bytes += bytes;
        return 0;
      },
      &walk);
  for (Segment& segment : walk.segments)
    for (Piece& piece : segment.pieces) {
      if (!piece.live) continue;
      size_t requested = 0;
      const size_t bytes = mm_arena_block(arena(), reinterpret_cast<void*>(piece.address), &requested);
      piece.requested_bytes = bytes == piece.bytes ? requested : piece.bytes;  // freed since the walk
      segment.requested_bytes += piece.requested_bytes;
    }
  return std::move(walk.segments);
}

}  // namespace memmgr
