// Long: one class, whose requests, frees, stream order and budget share one lock and its sums.
#include "arena.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <utility>
#include <vector>

namespace memmgr {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kGiB = uint64_t{1} << 30;
constexpr int kLargeUnitShift = std::countr_zero(uint64_t{MM_UNIT});
constexpr uint64_t kAbsurdBytes = uint64_t{1} << 46;  // longer than any range; keeps the sums from overflowing
// Reclaims in a row after which resident bytes were never lower than before: the callback frees no bytes in spite of
// its result, or other threads take all of them.
constexpr int kPatience = 1024;
constexpr uint64_t kChunks = 1024;         // in the budget, before it is known which blocks lack pages
constexpr uint64_t kMostChunks = 8192;     // in the budget
constexpr uint64_t kSmallInBudget = 4096;  // of the longest small blocks at least
constexpr uint64_t kLeastChunk = uint64_t{64} << 10;
constexpr uint64_t kAddresses = 4;  // times the budget, where blocks are aligned
// Pages given back so often for one try, each time taken by others before us.
constexpr int kRoundsForRoom = 256;

uint64_t RoundUp(uint64_t bytes, uint64_t to) { return (bytes + to - 1) & ~(to - 1); }
uint64_t RoundUpTo(uint64_t bytes, int shift) { return RoundUp(bytes, uint64_t{1} << shift); }

// A callback may itself allocate; if that fell short it would call the callback again, without end. The arenas in whose
// callback this thread is, innermost first.
struct ReclaimFrame {
  const Arena* arena;
  ReclaimFrame* outer;
};
thread_local ReclaimFrame* reclaim_frames = nullptr;
thread_local int own_work = 0;  // above 0: allocations of this thread would not exist without memmgr

bool InReclaimOf(const Arena* arena) {
  for (ReclaimFrame* frame = reclaim_frames; frame != nullptr; frame = frame->outer) {
    if (frame->arena == arena) return true;
  }
  return false;
}

// Pages given back in one area move to the other.
class Moving {
 public:
  Moving(const PageOps& pages, uint64_t chunk_bytes) : pages_(chunk_bytes != 0 ? &pages : nullptr) {
    if (pages_ != nullptr) pages_->moving(pages_->user, chunk_bytes);
  }
  ~Moving() {
    if (pages_ != nullptr) pages_->moving(pages_->user, 0);
  }
  Moving(const Moving&) = delete;
  Moving& operator=(const Moving&) = delete;

 private:
  const PageOps* const pages_;
};

uint64_t PhysicalBytes() {
  return static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace

// ---- life ------------------------------------------------------------------------------------------------------

Arena* Arena::CreateOnHost(uint64_t budget_bytes, uint64_t reserve_bytes, std::string* wrong) {
  Areas areas{reserve_bytes, reserve_bytes, 0};
  if (reserve_bytes == 0) {
    areas = {std::max(64 * kGiB, 4 * PhysicalBytes()), kGiB, 0};
    if (budget_bytes < kAbsurdBytes) {
      areas.large_bytes = std::max(areas.large_bytes, kAddresses * budget_bytes);
      areas.least_large_bytes = std::max(areas.least_large_bytes, budget_bytes);
    }
  }
  auto host = std::make_unique<HostPages>();
  Arena* arena = Create(host->ops(), budget_bytes, areas, wrong);
  if (arena != nullptr) arena->host_ = std::move(host);
  return arena;
}

Arena* Arena::Create(const PageOps& pages, uint64_t budget_bytes, Areas areas, std::string* wrong) {
  const uint64_t least = areas.least_large_bytes;
  if (areas.large_bytes > kAbsurdBytes) {
    *wrong = "the address range is too long";
    return nullptr;
  }
  // Under `ulimit -v` there may be fewer addresses than wanted. The length of the budget is the least that works.
  for (uint64_t large = areas.large_bytes;; large /= 2) {
    large = RoundUp(std::max(large, least), pages.page_bytes);
    const uint64_t small_bytes = areas.small_bytes != 0 ? areas.small_bytes : std::max(large / 8, kMiB);
    const uint64_t small = RoundUp(small_bytes, pages.page_bytes);
    errno = 0;
    const uint64_t shared = RoundUp(areas.shared_bytes, pages.page_bytes);
    char* base = static_cast<char*>(pages.reserve(pages.user, large + small + shared));
    if (base != nullptr)
      return new Arena(pages, base, {large, least, small, areas.small_unit_shift, shared, areas.most_small},
                       budget_bytes);
    if (large <= RoundUp(least, pages.page_bytes)) break;
  }
  *wrong = "cannot reserve " + std::to_string(least) + " bytes of addresses";
  if (errno != 0) *wrong += std::string(": ") + strerror(errno);
  return nullptr;
}

Arena::Arena(const PageOps& pages, char* base, const Areas& areas, uint64_t budget_bytes)
    : pages_(pages),
      base_(base),
      range_bytes_(areas.large_bytes + areas.small_bytes + areas.shared_bytes),
      debug_(getenv("MEMMGR_DEBUG") != nullptr && strcmp(getenv("MEMMGR_DEBUG"), "1") == 0),
      large_(pages, &sets_, base, areas.large_bytes, kLargeUnitShift),
      small_(pages, &sets_, base + areas.large_bytes, areas.small_bytes, areas.small_unit_shift),
      most_small_(areas.most_small),
      small_limit_(areas.most_small),
      budget_bytes_(budget_bytes) {
  ChooseChunk();
  ChooseSmall();
  WatchForks();
}

Arena::~Arena() {
  IgnoreForks();
  for (const Shared& shared : shared_) {
    StreamMask touched = 0;
    StreamTimes times;
    shared.frames->EndGivingUp(
        shared.frames->BeginGivingUp(shared.frames->idle(), SharedFrames::kNoSite, &touched, &times), true);
  }
  pages_.release(pages_.user, base_, range_bytes_);
}

void Arena::AfterForkInChild() {
  forked_.store(true, std::memory_order_relaxed);
  lock_.Renew();
  room_lock_.Renew();
}

// ---- budget ----------------------------------------------------------------------------------------------------

uint64_t Arena::Shortage(uint64_t bytes) const {
  const uint64_t after = resident() + promised_bytes_.load(std::memory_order_relaxed) + bytes;
  return after > budget() ? after - budget() : 0;
}

uint64_t Arena::GiveBackNow(uint64_t pages) {
  if (pages_.give_back != GiveBack::kAtOnce) return 0;
  const uint64_t given = large_.GiveBack(pages);
  return given < pages ? given + small_.GiveBack(pages - given) : given;
}

// The pages have no owner while the streams are waited for without the lock: frees never wait, and work of a
// stream that is waited for may itself end in a free. Frames of places that have gone go first, and those of the period
// that runs last. `missing`: for a site, which keeps its frames.
uint64_t Arena::GiveBackSettled(Hold* hold, uint64_t pages, SiteRoom missing) {
  if (!waits()) return GiveBackNow(pages);
  hold->unlock();
  std::lock_guard room(room_lock_);
  hold->lock();
  Block* large = large_.Detach(pages, nullptr);
  Block* small = large_.away_pages() < pages ? small_.Detach(pages - large_.away_pages(), nullptr) : nullptr;
  StreamMask touched = 0;
  StreamTimes times;
  std::vector<std::pair<SharedFrames*, SharedFrames::Leaving>> leaving;
  const uint64_t away_bytes = away_pages() * pages_.page_bytes;
  const uint64_t bytes = missing.bytes > 0 ? missing.bytes : pages * pages_.page_bytes;
  uint64_t left = bytes - std::min(bytes, away_bytes);
  const auto let_go_of = [&](const Shared& shared, size_t but) {
    if (left == 0) return;
    const uint64_t frames = (left + pages_.frame_bytes - 1) / pages_.frame_bytes;
    SharedFrames::Leaving those = shared.frames->BeginGivingUp(frames, but, &touched, &times);
    left -= std::min(left, those.frames.size() * pages_.frame_bytes);
    if (!those.frames.empty()) leaving.emplace_back(shared.frames.get(), std::move(those));
  };
  const auto is_followed = [&](const Shared& shared) { return shared.frames.get() == following_; };
  for (const bool retired : {true, false})
    for (const Shared& shared : shared_)
      if ((shared.of == nullptr) == retired && !is_followed(shared)) let_go_of(shared, SharedFrames::kNoSite);
  for (const Shared& shared : shared_)
    if (is_followed(shared)) let_go_of(shared, missing.bytes > 0 ? missing.site : SharedFrames::kNoSite);
  for (Block* list : {large, small}) {
    for (Block* piece = list; piece != nullptr; piece = piece->left) {
      if (piece->touched == 0) continue;
      touched |= sets_.Mask(piece->touched);
      times.Raise(piece->times);
    }
  }
  hold->unlock();
  const bool none = large == nullptr && small == nullptr && leaving.empty();
  const bool settled = none || pages_.settle(pages_.user, touched, times) == 0;
  uint64_t given = 0;
  const auto come_back = [&](Heap* heap, Block* list, char* base) {
    while (list != nullptr) {
      Block* piece = list;
      list = piece->left;
      const uint64_t bytes = piece->bytes;
      const bool gone = settled && pages_.decommit(pages_.user, base + piece->offset, bytes) == 0;
      hold->lock();
      heap->Reattach(piece, gone);
      hold->unlock();
      if (gone) given += bytes / pages_.page_bytes;
    }
  };
  come_back(&large_, large, base_);
  come_back(&small_, small, base_ + large_.bytes());
  hold->lock();
  uint64_t frames_given = 0;
  for (const auto& [frames, those] : leaving) frames_given += frames->EndGivingUp(those, settled);
  return given + PagesFor(frames_given * pages_.frame_bytes);
}

// I2: pages that have to be given back before `extra_pages` are committed.
uint64_t Arena::ExcessPages(uint64_t extra_pages) const {
  const uint64_t bytes = committed_bytes() + extra_pages * pages_.page_bytes + stats_.outside_bytes;
  if (bytes <= budget() || (spare_pages() == 0 && away_pages() == 0 && IdleFrameBytes() == 0)) return 0;
  return PagesFor(bytes - budget());
}

// Returns the pages that reclaim has to find before `extra_pages` are committed, after all that can be given back has
// been. The ends of blocks hold pages in part, and so pages may pass a budget that the bytes keep: by less than one
// page in each of the two areas, or by as much as reclaim once found nobody for, until memory is within the budget
// again. In a period with places memory is planned to the last page: to give frames back for these pages would move
// pages in each period.
uint64_t Arena::PagesBeyond(uint64_t extra_pages) {
  if (!waits() || places_ != nullptr) return 0;
  const uint64_t bytes = committed_bytes() + extra_pages * pages_.page_bytes + stats_.outside_bytes;
  const uint64_t excess = bytes - std::min(bytes, budget());
  if (excess == 0) conceded_bytes_ = 0;
  const uint64_t allowed = std::max(conceded_bytes_, 2 * pages_.page_bytes - 1);
  return excess > allowed ? PagesFor(excess - allowed) : 0;
}

// After every change that concerns the budget, where no wait is allowed.
void Arena::ObeyBudget() {
  if (pages_.give_back != GiveBack::kAtOnce) return;
  const uint64_t excess = ExcessPages(0);
  if (excess > 0) GiveBackNow(excess);
}

void Arena::ObeyBudgetNow(Hold* hold) {
  const uint64_t excess = ExcessPages(0);
  if (excess > 0) GiveBackSettled(hold, excess);
  ReleaseKept();
}

void NoteOwnWork(int delta) { own_work += delta; }

inline void Arena::ResidentChanged() {
  const uint64_t now = held_bytes_ + stats_.outside_bytes;
  resident_.store(now, std::memory_order_relaxed);
  stats_.live_peak_bytes = std::max(stats_.live_peak_bytes, stats_.live_bytes);
  stats_.resident_peak_bytes = std::max(stats_.resident_peak_bytes, now);
  if (own_work > 0) return;
  const int64_t unmanaged = static_cast<int64_t>(now) + virtual_bytes_;
  const auto need = static_cast<uint64_t>(std::max<int64_t>(unmanaged, 0));
  stats_.unmanaged_peak_bytes = std::max(stats_.unmanaged_peak_bytes, need);
}

// Aligned blocks take up to twice their length of addresses. Every chunk that has been moved may be a mapping of its
// own.
void Arena::ChooseChunk() {
  const bool moved = pages_.moving != nullptr && remap_ == MM_REMAP_FIRST && budget() < kAbsurdBytes;
  if (!moved) return large_.SetChunk(0, false);
  const uint64_t shortest = std::max<uint64_t>(kLeastChunk, pages_.page_bytes);
  const uint64_t first = std::clamp<uint64_t>(std::bit_floor(budget() / kChunks), shortest, kMostChunk);
  const uint64_t least = std::clamp<uint64_t>(budget() / kMostChunks, shortest, kMostChunk);
  const uint64_t now = large_.chunk_bytes() != 0 ? large_.chunk_bytes() : first;
  const uint64_t page = pages_.page_bytes;
  const uint64_t chunk = chunks_.Best(now / page, (least + page - 1) / page, kMostChunk / page) * page;
  large_.SetChunk(chunk, large_.bytes() / kAddresses >= budget());
}

void Arena::SetReclaim(mm_reclaim_fn reclaim, void* user) {
  std::lock_guard hold(lock_);
  reclaim_ = reclaim;
  reclaim_user_ = user;
}

void Arena::SetBudget(uint64_t bytes) {
  Hold hold(lock_);
  budget_bytes_.store(bytes, std::memory_order_relaxed);
  conceded_bytes_ = 0;
  ChooseChunk();
  ChooseSmall();
  if (forked()) return;
  ObeyBudgetNow(&hold);
  Verify("set_budget");
}

// Without a limit it stays as it was: blocks that come back when a budget closes are placed as they were in it.
void Arena::ChooseSmall() {
  if (budget() < kAbsurdBytes) small_limit_ = std::clamp(budget() / kSmallInBudget, kLeastSmall, most_small_);
}

void Arena::AddOutside(int64_t delta) {
  std::lock_guard hold(lock_);
  if (forked()) return;
  // A caller that gives back more than it took must not wrap the sum around and end all allocation.
  const uint64_t lost = delta < 0 ? uint64_t{0} - static_cast<uint64_t>(delta) : 0;
  stats_.outside_bytes = delta < 0 ? stats_.outside_bytes - std::min(stats_.outside_bytes, lost)
                                   : stats_.outside_bytes + static_cast<uint64_t>(delta);
  ResidentChanged();
  ObeyBudget();
  Verify("add_outside");
}

void Arena::Promise(int64_t delta) {
  std::lock_guard hold(lock_);  // no allocation has looked for room and not taken it yet
  promised_bytes_.fetch_add(static_cast<uint64_t>(delta), std::memory_order_relaxed);
}

void Arena::NoteVirtual(int64_t delta) {
  std::lock_guard hold(lock_);
  virtual_bytes_ += delta;  // no peak: an eviction is noted before its block is free, a restore after its block is
                            // taken
}

// ---- allocate --------------------------------------------------------------------------------------------------

// Without remap a run below the limit always has its bytes: large blocks may fill the budget without outside bytes and
// small blocks.
uint64_t Arena::Limit() const {
  if (budget() == MM_UNLIMITED) return large_.bytes();
  const uint64_t used = stats_.outside_bytes + (held_bytes_ - large_held_bytes_);
  const uint64_t rest = budget() - std::min(budget(), used);
  return std::min(large_.bytes(), rest >> kLargeUnitShift << kLargeUnitShift);
}

void Arena::SetLayout(int remap) {
  std::lock_guard hold(lock_);
  remap_ = remap;
  ChooseChunk();
}

// ---- sites ----------------------------------------------------------------------------------------------------

void Arena::Follow(Places* places) {
  Hold hold(lock_);
  places_ = places != nullptr && pages_.take_frame != nullptr && !forked() ? places : nullptr;
  following_ = nullptr;
  std::erase_if(shared_, [](const Shared& shared) {
    return shared.of == nullptr && shared.frames->live_blocks() == 0 && shared.frames->backed() == 0;
  });
  if (places_ == nullptr) return;
  for (const Shared& shared : shared_)
    if (shared.of == places) following_ = shared.frames.get();
  if (!places->Begin(pages_.frame_bytes)) return;
  hold.unlock();
  Places::Computed computed = places->Compute();
  hold.lock();
  Retire(places);
  following_ = Share(places, std::move(computed.layout));
  if (following_ == nullptr) computed = {};
  places->Use(std::move(computed.rows), computed.layout.frames);
}

void Arena::At(uint32_t position) {
  std::lock_guard hold(lock_);
  if (places_ != nullptr) places_->At(position);
}

void Arena::Forget(const Places* places) {
  std::lock_guard hold(lock_);
  if (places_ == places) {
    places_ = nullptr;
    following_ = nullptr;
  }
  Retire(places);
}

// Their memory is the first that is given back.
void Arena::Retire(const Places* places) {
  for (Shared& shared : shared_)
    if (shared.of == places) shared.of = nullptr;
}

// nullptr: there are no sites, or not as many addresses.
SharedFrames* Arena::Share(const Places* places, Layout layout) {
  uint64_t bytes = 0;
  for (const SiteFrames& site : layout.sites) bytes += site.frames.size() * pages_.frame_bytes;
  uint64_t at = large_.bytes() + small_.bytes();
  for (const Shared& shared : shared_) at = std::max(at, shared.frames->end());
  if (bytes == 0 || at + bytes > range_bytes_) return nullptr;
  shared_.push_back({places, std::make_unique<SharedFrames>(pages_, &sets_, base_, at, std::move(layout))});
  return shared_.back().frames.get();
}

// nullptr: it has no site, or its site is not free or can have no memory; or, with `room`, memory has to be given back
// elsewhere first.
void* Arena::TrySite(Request* request) {
  const StreamOrder* order = request->order;
  if (following_ == nullptr || request->no_site) return nullptr;
  if (order != nullptr && (order->pool != 0 || order->allowed != ~StreamMask{0})) return nullptr;
  const size_t site = places_->SiteOf(request->bytes);
  if (site == Places::kNone || !following_->IsFree(site)) return nullptr;
  if (const uint64_t missing = following_->Missing(site); missing > 0) {
    const uint64_t bytes = committed_bytes() + missing * pages_.frame_bytes + stats_.outside_bytes;
    const uint64_t excess = bytes - std::min(bytes, budget());
    const uint64_t others = (spare_pages() + away_pages()) * pages_.page_bytes + IdleFrameBytes(following_);
    if (excess > others) places_->Lacked(excess - others);
    const uint64_t available = others + following_->IdleBut(site) * pages_.frame_bytes;
    if (excess > available) {  // blocks have to leave: another place would take the memory of its own frames
      request->need = excess - available;
      request->lacks_memory = true;
      return nullptr;
    }
    if (excess > 0) {
      request->room = PagesFor(excess);
      request->site_room = {site, excess};
      return nullptr;
    }
  }
  if (!following_->Back(site)) return nullptr;
  held_bytes_ += request->bytes;
  return HandOut(nullptr, following_->Take(site, request->bytes, request->requested_bytes), request);
}

// Memory in stream order may have to be of few streams; otherwise any run will do.
inline Spot Arena::Find(const Heap& heap, const Request& request, uint64_t limit) const {
  if (request.order != nullptr && request.order->allowed != ~StreamMask{0})
    return heap.FindWithin(request.bytes, limit, request.order->allowed);
  Block* run = heap.Find(request.bytes, limit);
  return run != nullptr ? Spot{run, heap.LowerEnd(run, limit, request.bytes)} : Spot{};
}

inline Block* Arena::Place(Heap* heap, Request* request) {
  const uint64_t limit = heap == &large_ && !request->remap ? Limit() : heap->bytes();
  const Spot spot = Find(*heap, *request, limit);
  if (spot.run == nullptr) return nullptr;
  Block* block = heap->Take(spot, request->bytes, request->requested_bytes);
  return block->holes == 0 ? block : Back(heap, block, request);
}

Block* Arena::Back(Heap* heap, Block* block, Request* request) {
  const uint64_t excess = ExcessPages(block->holes);
  if (excess > 0 && request->bytes >= kLeastChunk &&
      chunks_.Note(RoundUp(request->bytes, pages_.page_bytes) / pages_.page_bytes, block->holes))
    ChooseChunk();
  const Moving moving(pages_, excess > 0 ? large_.chunk_bytes() : 0);
  if (excess > 0) {  // the remap, when the run is further up and spare pages are elsewhere
    const uint64_t committed = committed_bytes();
    GiveBackNow(excess);
    stats_.remapped_bytes += committed - committed_bytes();
    if (waits()) request->room = excess;
  } else if (!request->beyond) {
    request->room = PagesBeyond(block->holes);
    request->lacks_pages = request->room > 0;
  }
  if (request->room > 0) {
    heap->Free(block);
    return nullptr;
  }
  if (!heap->Back(block)) {
    // Other processes have the memory, although the budget allows it. It has to come from pages given back elsewhere,
    // or from reclaim.
    request->room = block->holes;
    heap->Free(block);
    return nullptr;
  }
  return block;
}

// Under the lock.
inline void Arena::CountSmall(uint64_t bytes, int sign) {
  if (bytes < MM_SMALL_FROM || bytes >= MM_SMALL_TO) return;
  const uint64_t now = small_bytes_.load(std::memory_order_relaxed);
  small_bytes_.store(sign > 0 ? now + bytes : now - bytes, std::memory_order_relaxed);
}

// `heap`: nullptr for a block at its site.
inline void* Arena::HandOut(Heap* heap, Block* block, Request* request) {
  if (StreamOrder* order = request->order) {
    order->touched = sets_.Mask(block->touched);
    order->times = block->times;
    order->frees = stats_.frees;
    block->touched = sets_.Of(order->own);
    block->times = {{kTail, 0, 0}};
    block->home = order->home;
  }
  stats_.live_bytes += request->bytes;
  CountSmall(request->bytes, 1);
  stats_.requested_bytes += request->requested_bytes;
  ++stats_.allocations;
  stats_.committed_peak_bytes = std::max(stats_.committed_peak_bytes, committed_bytes());
  ResidentChanged();
  const uint64_t offset = block->offset + (heap == &small_ ? large_.bytes() : 0);
  if (places_ != nullptr && heap != &small_) places_->Taken(offset, request->bytes, heap == nullptr);
  Verify("alloc");
  return base_ + offset;
}

// From the pool's own memory: it is held already, so the budget does not matter.
void* Arena::TryPool(Request* request) {
  for (Heap* heap : {&small_, &large_}) {
    if (heap == &small_ && request->requested_bytes > small_limit_) continue;
    request->bytes = RoundUpTo(request->requested_bytes, heap->unit_shift());
    const Spot spot = heap->FindPooled(request->order->pool, request->bytes, request->order->allowed);
    if (spot.run != nullptr) return HandOut(heap, heap->Take(spot, request->bytes, request->requested_bytes), request);
  }
  return nullptr;
}

// Hands out a block if the budget and the addresses allow it; otherwise sets request->need and room to the missing
// bytes and pages.
void* Arena::Try(Request* request) {
  request->lacks_pages = false;
  if (request->order != nullptr && request->order->pool != 0) {
    if (void* p = TryPool(request)) return p;
  }
  Heap* heap = request->requested_bytes <= small_limit_ ? &small_ : &large_;
  request->bytes = RoundUpTo(request->requested_bytes, heap->unit_shift());
  request->need = Shortage(request->bytes);
  if (request->need > 0) return nullptr;
  if (places_ != nullptr && heap == &large_) {
    if (void* p = TrySite(request)) return p;
    if (request->room > 0 || request->need > 0) return nullptr;
  }
  Block* block = Place(heap, request);
  if (block == nullptr && heap == &small_ && request->room == 0) {
    heap = &large_;  // the small area is full: the other one can hold it as well
    request->bytes = RoundUpTo(request->requested_bytes, kLargeUnitShift);
    request->need = Shortage(request->bytes);
    if (request->need > 0) return nullptr;
    block = Place(heap, request);
  }
  if (block == nullptr) return nullptr;
  if (request->order != nullptr) block->pool = request->order->pool;
  held_bytes_ += request->bytes;
  if (heap == &large_) large_held_bytes_ += request->bytes;
  return HandOut(heap, block, request);
}

inline void* Arena::MakeRoomAndTry(Hold* hold, Request* request) {
  const bool at_once = request->order != nullptr && request->order->at_once;
  if (waits() && !at_once) {
    ObeyBudgetNow(hold);
    return MakeRoom(hold, request);
  }
  request->room = 0;
  void* p = Try(request);
  return p != nullptr || request->room == 0 || at_once ? p : MakeRoom(hold, request);
}

// A block that has no site takes memory from frames that their sites will want back in each period. One whose site
// lacked memory has told so already.
void Arena::NoteTakenFromSites(const Request& request) {
  if (following_ == nullptr || request.site_room.bytes > 0 || request.no_site) return;
  const uint64_t others = (spare_pages() + away_pages()) * pages_.page_bytes + IdleFrameBytes(following_);
  const uint64_t wanted = request.room * pages_.page_bytes;
  if (wanted > others) places_->Took(wanted - others + following_->Unbacked() * pages_.frame_bytes);
}

// Tries as long as giving pages back elsewhere helps. When it does not, the missing pages are missing bytes: reclaim
// gets that number.
void* Arena::MakeRoom(Hold* hold, Request* request) {
  bool helped = true;
  for (int round = 0;; ++round) {
    request->room = 0;
    request->site_room = {0, 0};
    void* p = Try(request);
    if (p != nullptr || request->room == 0) {
      if (round > 0) ReleaseKept();
      return p;
    }
    if (request->site_room.bytes > 0 && (!helped || round >= kRoundsForRoom)) {
      request->no_site = helped = true;
      continue;
    }
    if (!helped || round >= kRoundsForRoom) {
      request->need = request->room * pages_.page_bytes;
      ReleaseKept();
      return nullptr;
    }
    NoteTakenFromSites(*request);
    // Even after "nothing": another thread may have given back the pages that this needs.
    const uint64_t given = GiveBackSettled(hold, request->room, request->site_room);
    if (waits()) stats_.remapped_bytes += given * pages_.page_bytes;
    helped = given > 0;
  }
}

Arena::Request Arena::MakeRequest(uint64_t requested_bytes, StreamOrder* order) const {
  // In a period with places all bytes are planned: a block without a run has pages moved for it, and nobody leaves.
  const bool remap = remap_ == MM_REMAP_FIRST || (remap_ == MM_REMAP_LAST && places_ != nullptr);
  Request request{std::min(requested_bytes, kAbsurdBytes), 0, 0, remap, 0, order};
  request.beyond = order != nullptr && order->beyond;
  return request;
}

// Lets a request for which reclaim has found nobody do without a site, or pass the budget by pages. Returns false if it
// has neither way.
bool Arena::Concede(Request* request) {
  if (request->lacks_memory && !request->no_site)
    request->no_site = true;
  else if (request->lacks_pages && !request->beyond)
    request->beyond = true;
  else
    return false;
  return true;
}

void* Arena::Alloc(uint64_t requested_bytes, StreamOrder* order) {
  if (requested_bytes == 0 || forked()) return nullptr;
  Hold hold(lock_);
  Request request = MakeRequest(requested_bytes, order);
  void* p = MakeRoomAndTry(&hold, &request);
  if (order != nullptr && order->at_once) return p;
  if (p == nullptr) p = Reclaim(&hold, &request);
  while (p == nullptr && Concede(&request)) {
    p = MakeRoomAndTry(&hold, &request);
    if (p == nullptr) p = Reclaim(&hold, &request);
  }
  if (request.beyond) {
    const uint64_t committed = committed_bytes() + stats_.outside_bytes;
    if (committed > budget()) conceded_bytes_ = committed - budget();
  }
  if (p == nullptr) ++stats_.failures;
  return p;
}

void* Arena::TryAlloc(uint64_t requested_bytes, uint64_t keep_free, StreamOrder* order) {
  if (requested_bytes == 0 || forked()) return nullptr;
  Hold hold(lock_);
  Request request = MakeRequest(requested_bytes, order);
  const uint64_t most_bytes = RoundUpTo(request.requested_bytes, kLargeUnitShift);
  if (Shortage(most_bytes + std::min(keep_free, kAbsurdBytes)) > 0) return nullptr;
  return MakeRoomAndTry(&hold, &request);
}

// Alternates between the callback, without the lock, and another try. Another thread may take the freed bytes, so
// the number of rounds has no natural bound; it ends when a round releases or gains no bytes.
//
// Contiguity: `need` is 0 and the callback chooses the blocks. mm_arena_choose finds the cheapest run of blocks that
// makes `request.bytes` (window.h).
void* Arena::Reclaim(Hold* hold, Request* request) {
  const bool asks = reclaim_ != nullptr && request->bytes <= budget() && !InReclaimOf(this);
  if (asks) {
    void* p = Episode(hold, request);
    if (p != nullptr) return p;
  }
  if (remap_ != MM_REMAP_LAST || request->need > 0) return nullptr;
  request->remap = true;
  void* p = MakeRoomAndTry(hold, request);
  return p == nullptr && asks && request->lacks_pages ? Episode(hold, request) : p;
}

// Free bytes are those that large blocks could still have; with the whole range open, any of them make a run.
void Arena::BeginEpisode(const Request& request) {
  ++stats_.episodes;
  if (request.need == 0) ++stats_.episodes_contiguity;
  if (budget() == MM_UNLIMITED || budget() == 0) return;
  const double placeable = static_cast<double>(Placeable());
  const double share = placeable / static_cast<double>(budget());
  stats_.free_share_sum += share;
  stats_.free_share_max = std::max(stats_.free_share_max, share);
  if (remap_ == MM_REMAP_FIRST || placeable == 0) return;
  const double longest = static_cast<double>(large_.LongestRunBytes(Limit()));
  const double fragmentation = std::max(0.0, 1 - longest / placeable);
  stats_.fragmentation_sum += fragmentation;
  stats_.fragmentation_max = std::max(stats_.fragmentation_max, fragmentation);
}

void* Arena::Episode(Hold* hold, Request* request) {
  BeginEpisode(*request);
  const uint64_t short_of = request->need;
  const auto beyond = [](uint64_t bytes, uint64_t than) { return bytes - std::min(bytes, than); };
  uint64_t released_in_all = 0;
  uint64_t lowest = resident();
  int fruitless = 0;
  for (int attempt = 0; fruitless < kPatience; ++attempt) {
    const mm_reclaim_fn reclaim = reclaim_;
    void* const user = reclaim_user_;
    if (reclaim == nullptr) return nullptr;
    ++stats_.reclaims;
    if (request->need == 0) ++stats_.reclaims_contiguity;
    hold->unlock();
    ReclaimFrame frame{this, reclaim_frames};
    reclaim_frames = &frame;
    const auto start = std::chrono::steady_clock::now();
    const uint64_t released = reclaim(user, request->need, request->bytes, attempt);
    const auto end = std::chrono::steady_clock::now();
    reclaim_frames = frame.outer;
    hold->lock();
    stats_.reclaim_nanoseconds += std::chrono::duration_cast<std::chrono::nanoseconds>(end - start).count();
    stats_.evicted_bytes += released;
    stats_.evicted_beyond_bytes -= beyond(released_in_all, short_of);
    stats_.evicted_excess_bytes -= beyond(released_in_all, request->bytes);
    released_in_all += released;
    stats_.evicted_beyond_bytes += beyond(released_in_all, short_of);
    stats_.evicted_excess_bytes += beyond(released_in_all, request->bytes);
    const bool gained = resident() < lowest;
    lowest = std::min(lowest, resident());
    fruitless = gained ? 0 : fruitless + 1;
    // Even after "nothing": another thread may have freed a block since.
    void* p = MakeRoomAndTry(hold, request);
    if (p != nullptr || released == 0) return p;
  }
  return nullptr;
}

// ---- free ------------------------------------------------------------------------------------------------------

inline void Arena::Release(Block* block, uint64_t offset) {
  stats_.live_bytes -= block->bytes;
  CountSmall(block->bytes, -1);
  stats_.requested_bytes -= block->bytes - block->slack;
  if (block->pool == 0) {
    held_bytes_ -= block->bytes;
    if (offset < large_.bytes()) large_held_bytes_ -= block->bytes;
  }
  ++stats_.frees;
  if (places_ != nullptr && !InSmall(offset)) places_->Freed(offset);
  if (InShared(offset))
    SharedAt(offset)->Free(block);
  else
    (InSmall(offset) ? small_ : large_).Free(block);
  resident_.store(held_bytes_ + stats_.outside_bytes, std::memory_order_relaxed);
  ObeyBudget();  // after the budget has shrunk, or where fragments take the room of spare pages
  Verify("free");
}

uint64_t Arena::Free(void* p, uint64_t now) {
  if (p == nullptr || forked()) return 0;
  std::lock_guard hold(lock_);
  const uint64_t offset = Offset(p);
  Block* block = offset < range_bytes_ ? FindLive(offset) : nullptr;
  if (block == nullptr) {
    // A second free, or a pointer into the middle: two owners would share memory afterwards. The process ends instead,
    // as with libc.
    fprintf(stderr, "memmgr: free of %p, which is not a live block\n", p);
    abort();
  }
  const uint64_t bytes = block->bytes;
  // A graph in a pool is replayed after its blocks were freed.
  if (block->touched != 0) block->times.at[0] = block->pool != 0 ? kTail : now;
  Release(block, offset);
  return bytes;
}

uint64_t Arena::Trim(uint64_t keep_bytes) {
  Hold hold(lock_);
  if (forked()) return 0;
  const uint64_t keep_pages = keep_bytes / pages_.page_bytes;
  const uint64_t spare = spare_pages() + PagesFor(IdleFrameBytes());
  const uint64_t given = spare > keep_pages ? GiveBackSettled(&hold, spare - keep_pages) : 0;
  ReleaseKept();
  Verify("trim");
  return given * pages_.page_bytes;
}

// ---- stream order ----------------------------------------------------------------------------------------------

void Arena::Waited(const void* p, const StreamOrder& order, uint64_t now) {
  std::lock_guard hold(lock_);
  if (forked() || stats_.frees != order.frees) return;
  const Block* block = FindLive(Offset(p));
  for (Block* run : {block->previous, block->next}) {
    if (run == nullptr || run->live || run->touched == 0) continue;
    if ((sets_.Mask(run->touched) & ~order.touched) != 0 || !run->times.NoLaterThan(order.times)) continue;
    run->touched = sets_.Of(order.own);
    run->times = {{now, 0, 0}};
  }
}

void Arena::Inherit(const void* p, const StreamOrder& order) {
  std::lock_guard hold(lock_);
  Block* block = forked() ? nullptr : FindLive(Offset(p));
  if (block == nullptr) return;
  block->touched = sets_.Of(order.touched | order.own);
  block->times = order.touched != 0 ? order.times : StreamTimes{};
}

void Arena::Return(void* p, const StreamOrder& order) {
  std::lock_guard hold(lock_);
  if (forked()) return;
  Block* block = FindLive(Offset(p));
  block->touched = sets_.Of(order.touched);
  block->times = order.times;
  Release(block, Offset(p));
}

void Arena::Touch(const void* p, StreamMask by, size_t kind, uint64_t now) {
  std::lock_guard hold(lock_);
  Block* block = forked() || !Owns(p) ? nullptr : FindLive(Offset(p));
  if (block == nullptr) return;
  block->touched = sets_.Union(block->touched, sets_.Of(by));
  block->times.at[kind] = std::max(block->times.at[kind], now);
}

void Arena::Untouch(const void* p, StreamMask by, size_t kind, StreamMask of_kind, uint64_t mark) {
  std::lock_guard hold(lock_);
  Block* block = forked() || !Owns(p) ? nullptr : FindLive(Offset(p));
  if (block == nullptr || block->times.at[kind] >= mark) return;
  const StreamMask rest = sets_.Mask(block->touched) & ~by;
  block->touched = sets_.Of(rest);
  if (kind != 0 && (rest & of_kind) == 0) block->times.at[kind] = 0;
}

void Arena::NoteUse(const void* p, uint64_t time) {
  std::lock_guard hold(lock_);
  Block* block = forked() || !Owns(p) ? nullptr : FindLive(Offset(p));
  if (block != nullptr) block->times.at[0] = time;
}

StreamMask Arena::TakeTouched(const void* p, StreamTimes* times) {
  std::lock_guard hold(lock_);
  Block* block = forked() || !Owns(p) ? nullptr : FindLive(Offset(p));
  if (block == nullptr) return 0;
  *times = block->times;
  block->times.at[0] = kTail;
  return sets_.Mask(block->touched);
}

void Arena::Settled(const void* p, StreamMask by) {
  std::lock_guard hold(lock_);
  Block* block = forked() || !Owns(p) ? nullptr : FindLive(Offset(p));
  if (block != nullptr) block->touched = sets_.Of(by);
}

int64_t Arena::Home(const void* p) {
  std::lock_guard hold(lock_);
  const Block* block = forked() || !Owns(p) ? nullptr : FindLive(Offset(p));
  return block != nullptr ? block->home : -1;
}

// The ids are assigned anew, so that sets which no block has do not add up.
void Arena::BeginSettling() {
  std::lock_guard hold(lock_);
  if (forked()) return;
  TouchedSets before;
  std::swap(before, sets_);
  for (Heap* heap : {&large_, &small_}) {
    heap->ForEach([&](Block* block) {
      const StreamMask mask = before.Mask(block->touched);
      // A live block stays in use. Replays of a graph in whose pool the block lies are not reported.
      block->touched = block->live || block->pool != 0 ? sets_.Of(mask) : sets_.Fenced(mask);
    });
  }
  for (const Shared& shared : shared_) {
    shared.frames->ForEachTouched([&](TouchedId* touched, bool in_use) {
      const StreamMask mask = before.Mask(*touched);
      *touched = in_use ? sets_.Of(mask) : sets_.Fenced(mask);
    });
  }
}

void Arena::EndSettling() {
  std::lock_guard hold(lock_);
  sets_.EmptyFenced();
}

bool Arena::ReservePool(uint8_t pool) {
  std::lock_guard hold(lock_);
  if (forked()) return false;
  large_.ReservePool(pool);
  small_.ReservePool(pool);
  return true;
}

uint64_t Arena::PoolBlocks(uint8_t pool) {
  std::lock_guard hold(lock_);
  uint64_t live = 0;
  for (Heap* heap : {&large_, &small_})
    heap->ForEach([&](const Block* block) { live += block->live && block->pool == pool ? 1 : 0; });
  return live;
}

void Arena::EndPool(uint8_t pool, StreamMask also) {
  std::lock_guard hold(lock_);
  if (forked()) return;
  for (Heap* heap : {&large_, &small_}) {
    const uint64_t before = heap->pooled_bytes();
    heap->EndPool(pool, also);
    const uint64_t released = before - heap->pooled_bytes();
    held_bytes_ -= released;
    if (heap == &large_) large_held_bytes_ -= released;
  }
  ResidentChanged();
  ObeyBudget();
  Verify("end_pool");
}

// ---- prices and searches ---------------------------------------------------------------------------------------

void Arena::SetPrices(const mm_price* prices, size_t n) {
  std::lock_guard hold(lock_);
  if (forked()) return;
  for (size_t i = 0; i < n; ++i) {
    if (!Owns(prices[i].p)) continue;
    Block* block = FindLive(Offset(prices[i].p));
    if (block == nullptr) continue;
    const bool priced = block->pool == 0 && prices[i].owner != nullptr && prices[i].cost >= 0 &&
                        std::isfinite(static_cast<float>(prices[i].cost));
    block->owner = prices[i].owner;
    block->cost = priced ? static_cast<float>(prices[i].cost) : kPinnedCost;
    block->last_access = prices[i].last_access;
  }
}

bool Arena::Disown(const void* p, const void* owner) {
  std::lock_guard hold(lock_);
  if (forked() || !Owns(p)) return false;
  Block* block = FindLive(Offset(p));
  if (block == nullptr || block->owner != owner) return false;
  block->owner = nullptr;
  block->cost = kPinnedCost;
  return true;
}

void Arena::SetStalenessExponent(double exponent) {
  std::lock_guard hold(lock_);
  staleness_exponent_ = exponent;
}

int64_t Arena::Choose(uint64_t need, uint64_t request, double now, mm_victim* out, size_t capacity) {
  std::lock_guard hold(lock_);
  if (forked()) return -1;
  const auto start = std::chrono::steady_clock::now();
  // A small block that is short of no bytes wants a run after all: its own area is full.
  const bool run_wanted = remap_ != MM_REMAP_FIRST && (request > small_limit_ || need == 0);
  chooser_.Gather(large_.first(), large_.last(), large_.blocks(), Limit(), now, staleness_exponent_);
  const bool found = chooser_.Choose(run_wanted ? request : 0, need);
  const auto took = std::chrono::steady_clock::now() - start;
  const uint64_t nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(took).count();
  ++stats_.searches;
  stats_.search_nanoseconds += nanoseconds;
  stats_.search_max_nanoseconds = std::max(stats_.search_max_nanoseconds, nanoseconds);
  if (!found) return -1;
  const auto& victims = chooser_.victims();
  for (size_t i = 0; i < std::min(victims.size(), capacity); ++i)
    out[i] = {base_ + victims[i]->offset, victims[i]->owner, victims[i]->bytes};
  return static_cast<int64_t>(victims.size());
}

// ---- look ------------------------------------------------------------------------------------------------------

uint64_t Arena::BlockBytes(const void* p, uint64_t* requested_bytes) {
  std::lock_guard hold(lock_);
  if (forked() || !Owns(p)) return 0;
  const Block* block = FindLive(Offset(p));
  if (block == nullptr) return 0;
  if (requested_bytes != nullptr) *requested_bytes = block->bytes - block->slack;
  return block->bytes;
}

bool Arena::Idle() {
  std::lock_guard hold(lock_);
  return stats_.live_bytes == 0;
}

void Arena::Stats(mm_arena_stats* out) {
  std::lock_guard hold(lock_);
  *out = stats_;
  out->budget_bytes = budget();
  out->committed_bytes = committed_bytes();
  out->live_blocks = large_.live_blocks() + small_.live_blocks();
  for (const Shared& shared : shared_) out->live_blocks += shared.frames->live_blocks();
  out->small_blocks = small_.live_blocks();
  out->free_bytes = large_.free_bytes() + small_.free_bytes() + IdleFrameBytes();
  if (forked()) return;
  out->largest_free_bytes = std::max(large_.LargestFreeBytes(), small_.LargestFreeBytes());
  out->placeable_bytes = Placeable();
  out->longest_run_bytes = large_.LongestRunBytes(Limit());
}

void Arena::ResetPeak() {
  std::lock_guard hold(lock_);
  stats_.live_peak_bytes = 0;
  stats_.resident_peak_bytes = 0;
  stats_.unmanaged_peak_bytes = 0;
  stats_.committed_peak_bytes = committed_bytes();
  ResidentChanged();
}

void Arena::ResetCounts() {
  std::lock_guard hold(lock_);
  const mm_arena_stats kept = stats_;
  stats_ = {};
  stats_.outside_bytes = kept.outside_bytes;
  stats_.live_bytes = kept.live_bytes;
  stats_.live_peak_bytes = kept.live_peak_bytes;
  stats_.resident_peak_bytes = kept.resident_peak_bytes;
  stats_.unmanaged_peak_bytes = kept.unmanaged_peak_bytes;
  stats_.committed_peak_bytes = kept.committed_peak_bytes;
  stats_.requested_bytes = kept.requested_bytes;
  stats_.allocations = kept.allocations;
  stats_.frees = kept.frees;
}

// The pieces are copied out first: a visitor in Python waits for the GIL, whose holder may be waiting for our lock.
void Arena::Walk(mm_block_fn visit, void* user) {
  struct Piece {
    uint64_t offset, bytes;
    int state;
  };
  std::vector<Piece> pieces;
  {
    std::lock_guard hold(lock_);
    if (forked()) return;
    uint64_t shift = 0;
    for (const Heap* heap : {&large_, &small_}) {
      heap->Walk([&](uint64_t offset, uint64_t bytes, int state) {
        pieces.push_back({offset + shift, bytes, state});
        return true;
      });
      shift += heap->bytes();
    }
    for (const Shared& shared : shared_)
      shared.frames->ForEachLive([&](uint64_t offset, uint64_t bytes) { pieces.push_back({offset, bytes, 1}); });
  }
  for (const Piece& piece : pieces) {
    if (visit(user, piece.offset, piece.bytes, piece.state) != 0) return;
  }
}

std::string Arena::Check() {
  std::lock_guard hold(lock_);
  return forked() ? "" : CheckLocked();
}

std::string Arena::CheckLocked() const {
  for (const Heap* heap : {&large_, &small_}) {
    if (std::string wrong = heap->Check(); !wrong.empty()) return (heap == &small_ ? "small area: " : "") + wrong;
  }
  uint64_t live = 0;
  for (const Heap* heap : {&large_, &small_}) {
    heap->Walk([&](uint64_t, uint64_t bytes, int state) {
      if (state == 1) live += bytes;
      return true;
    });
  }
  uint64_t shared_blocks = 0;
  for (const Shared& shared : shared_) {
    if (std::string wrong = shared.frames->Check(); !wrong.empty()) return wrong;
    shared.frames->ForEachLive([&](uint64_t, uint64_t bytes) { live += bytes; });
    shared_blocks += shared.frames->live_blocks();
  }
  uint64_t large_held = 0;
  for (const Block* block = large_.first(); block != nullptr; block = block->next)
    if (block->pool != kAway && (block->live || block->pool != 0)) large_held += block->bytes;
  if (large_held != large_held_bytes_) return "large_held_bytes is not the sum over the large blocks";
  if (held_bytes_ != stats_.live_bytes + large_.pooled_bytes() + small_.pooled_bytes())
    return "held is not live + pooled";
  if (live != stats_.live_bytes) return "live_bytes is not the sum over the live blocks";
  if (stats_.allocations - stats_.frees != large_.live_blocks() + small_.live_blocks() + shared_blocks)
    return "blocks are miscounted";
  if (resident() != held_bytes_ + stats_.outside_bytes) return "resident is not held + outside";
  const uint64_t committed = committed_bytes();
  if (pages_.give_back == GiveBack::kAtOnce && spare_pages() > 0 && committed + stats_.outside_bytes > budget())
    return "spare pages are kept over the budget";
  return "";
}

void Arena::VerifyNow(const char* event) const {
  const std::string wrong = CheckLocked();
  if (wrong.empty()) return;
  fprintf(stderr, "memmgr: after %s: %s\n", event, wrong.c_str());
  abort();
}

}  // namespace memmgr
