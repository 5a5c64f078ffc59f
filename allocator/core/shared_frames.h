// Shared frames: the memory under the sites of a period (places.h).
//
// Words:
//   frame   a piece of memory, no longer than a page, by the handle of its owner
//   site    a range of addresses, with a frame for each piece of it. Its block is live or there is none. A frame is
//           mapped at its place in a site at the site's first use, and goes from there alone
//   part    of a frame: its head or its tail. Two live blocks may have one each
//   busy    of a frame: a live block has a part of it, or its memory is being given up
// Stream order goes with the part: its next block waits for the streams that touched it under any of its addresses.
// CUDA promises that a kernel's writes through one address are seen through another one once the kernel has ended, and
// these waits are for its end.
//
// The arena's lock guards it. Memory is given up in two steps, as that of runs is: the streams that touched a site have
// to be waited for before it is unmapped, without the lock.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "block_index.h"
#include "pages.h"
#include "places.h"
#include "touched.h"

namespace memmgr {

class SharedFrames {
 public:
  // `offset`: of its first address in the arena's range.
  SharedFrames(const PageOps& pages, TouchedSets* sets, char* base, uint64_t offset, Layout layout);
  SharedFrames(const SharedFrames&) = delete;
  SharedFrames& operator=(const SharedFrames&) = delete;

  uint64_t offset() const { return offset_; }
  uint64_t end() const { return end_; }

  // No block has a part of a frame that the site's would have.
  bool IsFree(size_t site) const;
  // Frames of the site that have no memory yet.
  uint64_t Missing(size_t site) const;
  // Its missing frames get memory and it is mapped. False: the system refuses.
  bool Back(size_t site);
  // The site's block, which is live from now on. Its streams are those of its frames.
  Block* Take(size_t site, uint64_t bytes, uint64_t requested_bytes);
  void Free(Block* block);
  // The live block at this offset; nullptr: there is none.
  Block* FindLive(uint64_t offset);

  // The memory of up to so many frames that are not busy and not of the site `but`, to be given up: they are busy until
  // EndGivingUp. Those that are mapped at the fewest addresses go first. `touched` and `times`: the work that has to
  // end before.
  static constexpr size_t kNoSite = ~size_t{0};
  struct Leaving {
    std::vector<uint32_t> frames;
    std::vector<uint32_t> sites;
  };
  Leaving BeginGivingUp(uint64_t frames, size_t but, StreamMask* touched, StreamTimes* times);
  // Returns the frames whose memory is gone. `settled`: the streams were waited for; else all stays as it was.
  uint64_t EndGivingUp(const Leaving& leaving, bool settled);

  uint64_t backed() const { return backed_; }  // frames with memory
  uint64_t idle() const { return backed_ - busy_; }
  uint64_t Unbacked() const { return frames_.size() - backed_; }
  uint64_t IdleBut(size_t site) const;  // that are not of the site
  uint64_t live_blocks() const { return live_blocks_; }
  // Visits all sets of streams. `in_use`: of a live block.
  template <typename Visitor>
  void ForEachTouched(const Visitor& visit) {
    for (Site& site : sites_) visit(&site.block.touched, site.block.live);
    for (Frame& frame : frames_) {
      visit(&frame.head.touched, false);
      visit(&frame.tail.touched, false);
    }
  }
  template <typename Visitor>
  void ForEachLive(const Visitor& visit) const {
    for (const Site& site : sites_)
      if (site.block.live) visit(site.block.offset, site.block.bytes);
  }
  // Empty when every invariant holds.
  std::string Check() const;

 private:
  struct Frame {
    struct Part {
      TouchedId touched = 0;
      StreamTimes times;
    };
    uint64_t memory = 0;  // 0: none
    uint8_t live = 0;     // the parts that live blocks have
    bool leaving = false;
    Part head, tail;
    bool busy() const { return live != 0 || leaving; }
    std::vector<uint32_t> sites;  // that have it
    uint32_t mapped = 0;          // at how many addresses it is
  };
  struct Site {
    Block block;        // after its end it keeps the streams that touched the site
    uint64_t base = 0;  // of its first frame; its block may begin in the tail of that
    std::vector<uint32_t> frames;
    std::vector<FrameParts> parts;  // by frame
    std::vector<bool> mapped;       // by frame
    uint64_t unmapped = 0;          // how many are not
    bool leaving = false;
  };
  Site* SiteAt(uint64_t offset);
  // Visits each part of a frame that the site's block has.
  template <typename Visitor>
  void ForEachPart(const Site& site, const Visitor& visit);
  void Raise(TouchedId* touched, StreamTimes* times, TouchedId by, const StreamTimes& at);
  uint64_t BytesOf(const Site& site) const { return site.frames.size() * pages_.frame_bytes; }
  // Calls `change(address, first frame, count)` for each longest run of frames of the site that `are` true of; stops at
  // an error. False: there was one.
  template <typename Are, typename Change>
  bool ForEachRun(const Site& site, const Are& are, const Change& change);
  void SetLive(Site* site, bool live);
  void SetMapped(Site* site, size_t first, size_t count, bool mapped);

  const PageOps& pages_;
  TouchedSets* const sets_;
  char* const base_;
  const uint64_t offset_;
  uint64_t end_;
  std::vector<Site> sites_;  // by offset
  std::vector<Frame> frames_;
  uint64_t backed_ = 0;
  uint64_t busy_ = 0;  // frames with memory that are
  uint64_t live_blocks_ = 0;
};

}  // namespace memmgr
