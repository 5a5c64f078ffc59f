// Places: where the blocks of a period lie that repeats, so that no page is moved in it.
//
// Best fit knows one request at a time, and a period whose blocks fill the budget leaves runs that are too short for
// its longest ones: then pages are moved, each time anew. A period that follows a plan asks for the same blocks in the
// same order as the one before. So two such periods in a row are noted, and from them a *site* is computed for each
// block of a frame or more: a range of addresses, and the frames, pieces of memory, that are mapped there. Addresses
// are many and memory is scarce: sites whose blocks never live at the same time have frames in common, each mapped at
// all of its addresses for as long as the period goes on repeating (shared_frames.h). Frames need not lie side by side,
// so that nothing is lost to fragments. A block that ends inside a frame leaves its *tail*, where another one begins:
// so as many frames suffice as the bytes that live at a time, as a rule.
//
// A request takes its site only where that is free at the time; else it is placed as any other, and may cost pages. So
// a period that does something else is slower, and as right.
//
// Words:
//   position  the number of the op that runs, as the caller counts them
//   request   position, bytes, and how many requests of these bytes there were before it at that position
//   moment    the number of a request or a free in the period. Periods follow one another, so moments form a ring
// Not thread-safe: the arena's lock guards it, and Compute is called by the thread that begins a period.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "memmgr/core.h"

namespace memmgr {

// A block for `share_frames`: so many bytes, from the moment `birth` to before the moment `birth + life`, on a ring.
struct Tenant {
  uint64_t birth, life;
  uint64_t bytes;
  uint32_t site = 0;  // out
};

// The parts of a frame: its head ends where a block does, and its tail, to the end of the frame, is where another one
// begins. A frame that no block ends in is used whole.
enum FrameParts : uint8_t { kFrameHead = 1, kFrameTail = 2, kWholeFrame = kFrameHead | kFrameTail };

// The frames of a site, each with the parts that its block has. It begins at `start` in the first of them.
struct SiteFrames {
  uint64_t start = 0;
  std::vector<uint32_t> frames;
  std::vector<FrameParts> parts;
};

// No two tenants that live at the same time have a part of a frame in common.
struct Layout {
  std::vector<SiteFrames> sites;
  uint32_t frames = 0;
};

// A sweep over the moments, in which a tenant takes a site of its bytes that is free for long enough, or makes one: it
// begins in a tail where that saves a frame, and goes on in the frames that will be wanted soonest after it. Those that
// live on from one period to the next come first, each with parts of its own. With whole frames no order of intervals
// then needs more of them than live at a time, except where the free time of such a frame does not fit. Parts may need
// a few more.
Layout share_frames(std::vector<Tenant>* tenants, uint64_t ring, uint64_t frame_bytes);

class Places {
 public:
  static constexpr size_t kNone = ~size_t{0};

  struct Row {
    uint32_t position;
    uint64_t bytes;
    size_t site;
    bool used = false;
  };
  struct Computed {
    std::vector<Row> rows;  // by position
    Layout layout;
  };

  // A period begins. True: sites should be computed, before its first request.
  bool Begin(uint64_t page_bytes);
  // From the two periods before this one. The only call that needs no lock, since requests do not touch these.
  Computed Compute() const;
  void Use(std::vector<Row> rows, uint32_t frames);
  void At(uint32_t position) { position_ = position; }
  // The site of a request for so many bytes now; kNone: it has none.
  size_t SiteOf(uint64_t bytes) const;
  // A block was handed out. `sited`: at its site.
  void Taken(uint64_t offset, uint64_t bytes, bool sited);
  // So many bytes were missing for the memory of the site of this request.
  void Lacked(uint64_t bytes) { lacked_ = std::max(lacked_, bytes); }
  // A block without a site took memory from sites. Not counted while these are mapped, since blocks have other memory
  // then.
  void Took(uint64_t bytes) {
    if (age_ > kMappingPeriods) taken_ = std::max(taken_, bytes);
  }
  void Freed(uint64_t offset) { Note({position_, offset, 0}); }

  const mm_places_stats& stats() const { return stats_; }

 private:
  struct Event {
    uint32_t position;
    uint64_t offset;
    uint64_t bytes;  // 0: a free
  };
  struct Period {
    std::vector<Event> events;
    bool whole = false;
  };
  void Note(const Event& event);
  size_t Next(uint64_t bytes) const;

  uint32_t position_ = 0;
  Period now_, last_, older_;
  uint64_t page_bytes_ = 0;
  uint64_t asked_ = 0;      // bytes of this period's requests of a page or more
  uint64_t displaced_ = 0;  // of these, bytes that are at no site
  uint64_t siteless_ = 0;   // of these, of requests before a site lacked memory: they have no site, or it is not free
  bool short_ = false;      // sites have lacked memory in each period since one in which all blocks had theirs
  uint64_t taken_ = 0;      // the most bytes that another block took from sites
  uint64_t lacked_ = 0;     // the most bytes that were missing at a time
  static constexpr int kMappingPeriods = 3;
  int age_ = 0;            // periods since the sites were computed
  int misses_ = 0;         // periods in a row that missed their sites
  std::vector<Row> rows_;  // by position
  mm_places_stats stats_{};
};

}  // namespace memmgr
