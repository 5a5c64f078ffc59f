// Arena: one address range, one budget. It decides whether a request may have its bytes, and where.
//
// Words:
//   resident     live + outside bytes: the budget limits their sum
//   shortage     the bytes by which a request would pass the budget
//   contiguity   a request that has its bytes but no run of addresses that is long enough
//   remap        taking addresses further up, and giving back as many spare pages elsewhere: the cure for contiguity
//                while the range lasts
//   limit        the length of addresses that large blocks may lie in without remap: the budget without outside bytes
//                and small blocks, so that a run below the limit always has its bytes
//   episode      one request that has to reclaim, with any number of calls
//   room         spare pages that must be given back before a block can have its own
//   held         bytes of live blocks and of the pools' own memory
// The range is much longer than the budget, [0, large area) followed by [small area): addresses cost nothing. Best fit
// with the untouched end last keeps blocks low in the range; only fragmentation sends them further up.
//
// Invariants, checked after every event under MEMMGR_DEBUG=1:
//   I1  a block is handed out only while resident <= budget
//   I2  committed + outside > budget only while there is no spare page left to give back; where giving back waits
//       (GiveBack::kAfterSettle) this is so when pages are committed, not after every free, and they pass the budget by
//       a page for each area or more only after reclaim has found nobody, or in a period with places (PagesBeyond)
//   I3  those of each heap (heap.cpp)
#pragma once

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "chunk.h"
#include "fork.h"
#include "heap.h"
#include "lock.h"
#include "memmgr/core.h"
#include "places.h"
#include "shared_frames.h"
#include "window.h"

namespace memmgr {

// One request in stream order.
struct StreamOrder {
  StreamMask own = 0;  // the bit of the requesting stream
  uint16_t home = 0;   // its number
  uint8_t pool = 0;
  bool at_once = false;                 // do nothing that may wait or call back: give nothing back, do not reclaim
  bool beyond = false;                  // nobody is asked for pages that the budget has not: a capture
  StreamMask allowed = ~StreamMask{0};  // memory that other streams touched is not wanted
  StreamMask touched = 0;               // out: the streams to wait for, the stream itself included
  StreamTimes times{};                  // out: the time of their last work to wait for
  uint64_t frees = 0;                   // out: of the arena, up to then
};

constexpr uint64_t kLeastSmall = 8192;

// The lengths of the two areas. `least_large`: the length of the large one that suffices where addresses are few.
struct Areas {
  uint64_t large_bytes;
  uint64_t least_large_bytes;
  uint64_t small_bytes;       // 0: an eighth of the large one
  int small_unit_shift = 6;   // small blocks lie at multiples of 1 << this
  uint64_t shared_bytes = 0;  // addresses for sites (shared_frames.h)
  // The longest request that is small, as far as the budget is long. A block that lives on holds its whole page, and
  // those that fill little of a page lie together.
  uint64_t most_small = kLeastSmall;
};

class Arena final : private ForkAware {
 public:
  // nullptr with a text in *wrong.
  static Arena* Create(const PageOps& pages, uint64_t budget_bytes, Areas areas, std::string* wrong);
  // reserve_bytes 0: generous for this machine's memory.
  static Arena* CreateOnHost(uint64_t budget_bytes, uint64_t reserve_bytes, std::string* wrong);
  ~Arena();

  void SetReclaim(mm_reclaim_fn reclaim, void* user);
  void SetBudget(uint64_t bytes);
  void AddOutside(int64_t delta);
  void Promise(int64_t delta);
  void NoteVirtual(int64_t delta);

  void SetLayout(int remap);
  // A period begins whose blocks have sites (places.h); nullptr: one begins, or goes on, without.
  void Follow(Places* places);
  void At(uint32_t position);
  void Forget(const Places* places);  // they end
  // `order` is for memory in stream order; nullptr where there are no streams.
  void* Alloc(uint64_t requested_bytes, StreamOrder* order = nullptr);
  void* TryAlloc(uint64_t requested_bytes, uint64_t keep_free, StreamOrder* order = nullptr);
  // Its bytes. `now`: the device's clock, where there are streams.
  uint64_t Free(void* p, uint64_t now = 0);
  // The requesting stream has waited for the streams that touched p. The same holds for the runs beside p that are not
  // touched later: a later wait for this stream covers their streams too. `now`: the clock after that wait.
  void Waited(const void* p, const StreamOrder& order, uint64_t now);
  // The requesting stream has not waited: p is in use by the streams that touched it before, and has no other use yet.
  void Inherit(const void* p, const StreamOrder& order);
  // As if p had never been handed out. `order`: as set by Alloc.
  void Return(void* p, const StreamOrder& order);

  // All of these for live blocks.
  void Touch(const void* p, StreamMask by, size_t kind, uint64_t now);
  // Not if a stream of that kind has touched it since `mark`. `of_kind`: all streams of that kind.
  void Untouch(const void* p, StreamMask by, size_t kind, StreamMask of_kind, uint64_t mark);
  // The program's last use of the block was before `time`, whichever of the streams that touched it had it.
  void NoteUse(const void* p, uint64_t time);
  // The streams to wait for before the block is touched, and their times. The call drops the time of NoteUse.
  StreamMask TakeTouched(const void* p, StreamTimes* times);
  // All work that was queued on the block is behind the work of `by`.
  void Settled(const void* p, StreamMask by);
  int64_t Home(const void* p);  // the number of its stream; -1: no block begins at p
  // Between the two the CPU waits for every stream: touches of runs from before the first call have ended at the
  // second. One such pair at a time.
  void BeginSettling();
  void EndSettling();

  bool ReservePool(uint8_t pool);
  uint64_t PoolBlocks(uint8_t pool);  // live ones
  // The pool's memory is for all streams again, touched by `also` too.
  void EndPool(uint8_t pool, StreamMask also);
  uint64_t BlockBytes(const void* p, uint64_t* requested_bytes = nullptr);
  const void* Base() const { return base_; }
  bool Owns(const void* p) const { return Offset(p) < range_bytes_; }
  uint64_t Trim(uint64_t keep_bytes);

  void SetPrices(const mm_price* prices, size_t n);
  bool Disown(const void* p, const void* owner);
  void SetStalenessExponent(double exponent);
  int64_t Choose(uint64_t need, uint64_t request, double now, mm_victim* out, size_t capacity);

  bool Idle();  // no block is live

  void Stats(mm_arena_stats* out);
  void ResetPeak();
  void ResetCounts();
  // Bytes by which resident and promised bytes, with these, exceed the budget.
  uint64_t Shortage(uint64_t bytes) const;
  uint64_t small_bytes() const { return small_bytes_.load(std::memory_order_relaxed); }
  uint64_t resident() const { return resident_.load(std::memory_order_relaxed); }
  uint64_t budget() const { return budget_bytes_.load(std::memory_order_relaxed); }
  bool forked() const { return forked_.load(std::memory_order_relaxed); }
  void Walk(mm_block_fn visit, void* user);
  std::string Check();

  void AfterForkInChild() override;

 private:
  Arena(const PageOps& pages, char* base, const Areas& areas, uint64_t budget_bytes);
  using Hold = std::unique_lock<Lock>;

  // Bytes that are missing for the frames of a site; 0: none are.
  struct SiteRoom {
    size_t site;
    uint64_t bytes;
  };
  // A request on its way through Alloc.
  struct Request {
    uint64_t requested_bytes;
    uint64_t bytes;  // after alignment
    uint64_t need;   // the shortage that the last try found; 0: contiguity
    bool remap;      // addresses beyond the limit are allowed
    uint64_t room;   // pages that have to be given back first: then another try is worth it
    StreamOrder* order;
    SiteRoom site_room;         // `room` is for the frames of its site
    bool lacks_memory = false;  // its site does, and nothing more can be given back for it
    bool no_site = false;
    bool lacks_pages = false;  // its bytes fit, the pages for them pass the budget, and none are spare
    bool beyond = false;       // reclaim found nobody for them: the pages may pass the budget
  };
  uint64_t Offset(const void* p) const { return static_cast<uint64_t>(static_cast<const char*>(p) - base_); }
  bool InShared(uint64_t offset) const { return offset >= large_.bytes() + small_.bytes(); }
  bool InSmall(uint64_t offset) const { return offset >= large_.bytes() && !InShared(offset); }
  Block* FindLive(uint64_t offset) const {
    if (InShared(offset)) {
      SharedFrames* shared = SharedAt(offset);
      return shared != nullptr ? shared->FindLive(offset) : nullptr;
    }
    return InSmall(offset) ? small_.FindLive(offset - large_.bytes()) : large_.FindLive(offset);
  }
  Request MakeRequest(uint64_t requested_bytes, StreamOrder* order) const;
  uint64_t Limit() const;
  uint64_t Placeable() const { return Limit() - std::min(Limit(), large_held_bytes_); }
  uint64_t away_pages() const { return large_.away_pages() + small_.away_pages(); }
  uint64_t committed_bytes() const {
    uint64_t bytes = (large_.committed_pages() + small_.committed_pages()) * pages_.page_bytes;
    for (const Shared& shared : shared_) bytes += shared.frames->backed() * pages_.frame_bytes;
    return bytes;
  }
  uint64_t IdleFrameBytes(const SharedFrames* but = nullptr) const {
    uint64_t idle = 0;
    for (const Shared& shared : shared_) idle += shared.frames.get() != but ? shared.frames->idle() : 0;
    return idle * pages_.frame_bytes;
  }
  // Whole pages that hold so many bytes.
  uint64_t PagesFor(uint64_t bytes) const { return (bytes + pages_.page_bytes - 1) / pages_.page_bytes; }
  SharedFrames* SharedAt(uint64_t offset) const {
    for (const Shared& shared : shared_)
      if (shared.frames->offset() <= offset && offset < shared.frames->end()) return shared.frames.get();
    return nullptr;
  }
  void Retire(const Places* places);
  SharedFrames* Share(const Places* places, Layout layout);
  void* TrySite(Request* request);
  uint64_t spare_pages() const { return large_.spare_pages() + small_.spare_pages(); }

  void* Try(Request* request);
  void* TryPool(Request* request);
  void* MakeRoomAndTry(Hold* hold, Request* request);
  void* MakeRoom(Hold* hold, Request* request);
  void NoteTakenFromSites(const Request& request);
  Spot Find(const Heap& heap, const Request& request, uint64_t limit) const;
  Block* Place(Heap* heap, Request* request);
  Block* Back(Heap* heap, Block* block, Request* request);
  void CountSmall(uint64_t bytes, int sign);
  void* HandOut(Heap* heap, Block* block, Request* request);
  void Release(Block* block, uint64_t offset);
  void* Reclaim(Hold* hold, Request* request);
  void* Episode(Hold* hold, Request* request);
  void BeginEpisode(const Request& request);
  uint64_t GiveBackNow(uint64_t pages);
  uint64_t GiveBackSettled(Hold* hold, uint64_t pages, SiteRoom missing = {0, 0});
  uint64_t ExcessPages(uint64_t extra_pages) const;
  uint64_t PagesBeyond(uint64_t extra_pages);
  static bool Concede(Request* request);
  void ObeyBudget();
  void ObeyBudgetNow(Hold* hold);
  void ChooseChunk();
  void ChooseSmall();
  // Pages that were given back for a request and not used for it have no owner.
  void ReleaseKept() {
    if (waits()) pages_.release_kept(pages_.user);
  }
  bool waits() const { return pages_.give_back == GiveBack::kAfterSettle; }
  void ResidentChanged();
  std::string CheckLocked() const;
  void Verify(const char* event) const {
    if (debug_) VerifyNow(event);
  }
  void VerifyNow(const char* event) const;

  struct Shared {
    const Places* of;  // nullptr: their period has other sites now, or none
    std::unique_ptr<SharedFrames> frames;
  };

  std::unique_ptr<HostPages> host_;  // nullptr: the pages have another owner
  const PageOps& pages_;
  char* const base_;
  const uint64_t range_bytes_;
  const bool debug_;
  std::atomic<bool> forked_{false};

  Lock room_lock_;  // taken before lock_, and kept while pages move: a thread that also needs room waits for them
  Lock lock_;       // everything below
  TouchedSets sets_;
  Heap large_;
  Heap small_;
  const uint64_t most_small_;
  uint64_t small_limit_;  // the longest small request
  std::vector<Shared> shared_;
  Places* places_ = nullptr;           // of the period that runs
  SharedFrames* following_ = nullptr;  // theirs
  mm_reclaim_fn reclaim_ = nullptr;
  void* reclaim_user_ = nullptr;
  // Written under the lock, read anywhere.
  std::atomic<uint64_t> budget_bytes_;
  std::atomic<uint64_t> promised_bytes_{0};
  std::atomic<uint64_t> resident_{0};
  std::atomic<uint64_t> small_bytes_{0};  // of live blocks of MM_SMALL_FROM to MM_SMALL_TO
  int64_t virtual_bytes_ = 0;
  uint64_t conceded_bytes_ = 0;  // by which pages may pass the budget: reclaim has found nobody for them
  uint64_t held_bytes_ = 0;
  uint64_t large_held_bytes_ = 0;
  int remap_ = MM_REMAP_FIRST;
  ChunkChoice chunks_;
  double staleness_exponent_ = 1;
  Chooser chooser_;         // its columns are kept for the next search
  mm_arena_stats stats_{};  // the fields that are kept up to date; Stats() fills in the others
};

void NoteOwnWork(int delta);

}  // namespace memmgr
