#include "shared_frames.h"

#include <algorithm>
#include <utility>

#include "ordering.h"

namespace memmgr {

SharedFrames::SharedFrames(const PageOps& pages, TouchedSets* sets, char* base, uint64_t offset, Layout layout)
    : pages_(pages), sets_(sets), base_(base), offset_(offset), end_(offset), frames_(layout.frames) {
  sites_.resize(layout.sites.size());
  for (size_t i = 0; i < sites_.size(); ++i) {
    Site& site = sites_[i];
    site.frames = std::move(layout.sites[i].frames);
    site.parts = std::move(layout.sites[i].parts);
    site.mapped.resize(site.frames.size());
    site.unmapped = site.frames.size();
    for (const uint32_t frame : site.frames) frames_[frame].sites.push_back(static_cast<uint32_t>(i));
    site.base = end_;
    site.block.offset = end_ + layout.sites[i].start;
    end_ += BytesOf(site);
  }
}

bool SharedFrames::IsFree(size_t site) const {
  const Site& s = sites_[site];
  if (s.block.live || s.leaving) return false;
  for (size_t i = 0; i < s.frames.size(); ++i) {
    const Frame& frame = frames_[s.frames[i]];
    if (frame.leaving || (frame.live & s.parts[i]) != 0) return false;
  }
  return true;
}

uint64_t SharedFrames::Missing(size_t site) const {
  const std::vector<uint32_t>& frames = sites_[site].frames;
  return static_cast<uint64_t>(
      std::count_if(frames.begin(), frames.end(), [&](uint32_t frame) { return frames_[frame].memory == 0; }));
}

uint64_t SharedFrames::IdleBut(size_t site) const {
  const std::vector<uint32_t>& frames = sites_[site].frames;
  return idle() - static_cast<uint64_t>(std::count_if(frames.begin(), frames.end(), [&](uint32_t frame) {
           return frames_[frame].memory != 0 && !frames_[frame].busy();
         }));
}

template <typename Are, typename Change>
bool SharedFrames::ForEachRun(const Site& site, const Are& are, const Change& change) {
  for (size_t first = 0; first < site.frames.size();) {
    size_t end = first;
    while (end < site.frames.size() && are(end)) ++end;
    if (end > first && !change(base_ + site.base + first * pages_.frame_bytes, first, end - first)) return false;
    first = end + 1;
  }
  return true;
}

void SharedFrames::SetMapped(Site* site, size_t first, size_t count, bool mapped) {
  for (size_t i = first; i < first + count; ++i) {
    site->mapped[i] = mapped;
    frames_[site->frames[i]].mapped += mapped ? 1 : -1;
  }
  site->unmapped += mapped ? -count : count;
}

bool SharedFrames::Back(size_t site) {
  Site& s = sites_[site];
  if (s.unmapped == 0) return true;
  std::vector<uint64_t> memory;
  for (const uint32_t frame : s.frames) {
    uint64_t& handle = frames_[frame].memory;
    if (handle == 0) {
      handle = pages_.take_frame(pages_.user);
      if (handle == 0) return false;
      ++backed_;
    }
    memory.push_back(handle);
  }
  return ForEachRun(
      s, [&](size_t i) { return !s.mapped[i]; },
      [&](char* at, size_t first, size_t count) {
        if (pages_.map_frames(pages_.user, at, memory.data() + first, count) != 0) return false;
        SetMapped(&s, first, count, true);
        return true;
      });
}

void SharedFrames::Raise(TouchedId* touched, StreamTimes* times, TouchedId by, const StreamTimes& at) {
  if (by == 0) return;
  if (*touched == 0)
    *times = at;
  else
    times->Raise(at);
  *touched = sets_->Union(*touched, by);
}

template <typename Visitor>
void SharedFrames::ForEachPart(const Site& site, const Visitor& visit) {
  for (size_t i = 0; i < site.frames.size(); ++i) {
    Frame& frame = frames_[site.frames[i]];
    if ((site.parts[i] & kFrameHead) != 0) visit(&frame.head);
    if ((site.parts[i] & kFrameTail) != 0) visit(&frame.tail);
  }
}

void SharedFrames::SetLive(Site* site, bool live) {
  site->block.live = live;
  live_blocks_ += live ? 1 : -1;
  for (size_t i = 0; i < site->frames.size(); ++i) {
    Frame& frame = frames_[site->frames[i]];
    const bool busy = frame.busy();
    frame.live ^= site->parts[i];
    if (frame.busy() != busy) busy_ += busy ? -1 : 1;
  }
}

Block* SharedFrames::Take(size_t site, uint64_t bytes, uint64_t requested_bytes) {
  Site& s = sites_[site];
  Block* block = &s.block;
  block->touched = 0;
  ForEachPart(s, [&](Frame::Part* part) {
    Order<"frame.touched">([&] { return Raise(&block->touched, &block->times, part->touched, part->times), 0; });
    part->touched = 0;
  });
  SetLive(&s, true);
  block->bytes = bytes;
  block->slack = static_cast<uint16_t>(bytes - requested_bytes);
  block->home = 0;
  block->owner = nullptr;
  block->last_access = 0;
  block->cost = -1;
  return block;
}

void SharedFrames::Free(Block* block) {
  Site* site = SiteAt(block->offset);
  ForEachPart(*site, [&](Frame::Part* part) { *part = {block->touched, block->times}; });
  SetLive(site, false);
}

SharedFrames::Site* SharedFrames::SiteAt(uint64_t offset) {
  const auto at = std::lower_bound(sites_.begin(), sites_.end(), offset,
                                   [](const Site& site, uint64_t o) { return site.block.offset < o; });
  return at != sites_.end() && at->block.offset == offset ? &*at : nullptr;
}

Block* SharedFrames::FindLive(uint64_t offset) {
  Site* site = SiteAt(offset);
  return site != nullptr && site->block.live ? &site->block : nullptr;
}

// A site's last block keeps the streams that touched its addresses; its other frames may be busy under other ones.
SharedFrames::Leaving SharedFrames::BeginGivingUp(uint64_t frames, size_t but, StreamMask* touched,
                                                  StreamTimes* times) {
  Leaving leaving;
  std::vector<uint32_t>& chosen = leaving.frames;
  for (uint32_t i = static_cast<uint32_t>(frames_.size()); i-- > 0;) {
    const Frame& frame = frames_[i];
    if (frame.memory == 0 || frame.busy() || std::count(frame.sites.begin(), frame.sites.end(), but) > 0) continue;
    chosen.push_back(i);
  }
  std::stable_sort(chosen.begin(), chosen.end(),
                   [&](uint32_t a, uint32_t b) { return frames_[a].mapped < frames_[b].mapped; });
  if (chosen.size() > frames) chosen.resize(frames);
  busy_ += chosen.size();
  for (const uint32_t i : chosen) {
    frames_[i].leaving = true;
    for (const uint32_t number : frames_[i].sites) {
      Site& site = sites_[number];
      if (site.leaving || site.unmapped == site.frames.size()) continue;
      site.leaving = true;
      leaving.sites.push_back(number);
      if (site.block.touched == 0) continue;
      *touched |= Order<"site.touched">([&] { return sets_->Mask(site.block.touched); });
      times->Raise(site.block.times);
    }
  }
  return leaving;
}

uint64_t SharedFrames::EndGivingUp(const Leaving& leaving, bool settled) {
  for (const uint32_t number : leaving.sites) {
    Site& site = sites_[number];
    site.leaving = false;
    if (!settled) continue;
    ForEachRun(
        site, [&](size_t i) { return site.mapped[i] && frames_[site.frames[i]].leaving; },
        [&](char* at, size_t first, size_t count) {
          if (pages_.unmap_frames(pages_.user, at, count) == 0) SetMapped(&site, first, count, false);
          return true;  // a frame that stays mapped keeps its memory
        });
  }
  uint64_t given = 0;
  for (const uint32_t i : leaving.frames) {
    Frame& frame = frames_[i];
    frame.leaving = false;
    --busy_;
    if (!settled || frame.mapped > 0) continue;
    pages_.give_frame(pages_.user, std::exchange(frame.memory, 0));
    frame.head = frame.tail = {};
    --backed_;
    ++given;
  }
  return given;
}

std::string SharedFrames::Check() const {
  std::vector<uint32_t> users(frames_.size()), addresses(frames_.size());
  uint64_t live = 0, backed = 0, busy = 0;
  for (const Site& site : sites_) {
    const std::string at = " at offset " + std::to_string(site.block.offset);
    if (site.block.live && site.unmapped > 0) return "a live block's site is not mapped" + at;
    live += site.block.live ? 1 : 0;
    for (size_t i = 0; i < site.frames.size(); ++i) {
      uint32_t& parts = users[site.frames[i]];  // that live blocks have
      if (site.block.live && (parts & site.parts[i]) != 0) return "two live blocks have a part of a frame in common";
      if (site.block.live) parts |= site.parts[i];
      if (!site.mapped[i]) continue;
      if (frames_[site.frames[i]].memory == 0) return "a mapped site has a frame without memory" + at;
      ++addresses[site.frames[i]];
    }
  }
  for (size_t i = 0; i < frames_.size(); ++i) {
    if (users[i] != frames_[i].live) return "the parts of a frame that live blocks have are miscounted";
    if (addresses[i] != frames_[i].mapped) return "a frame's addresses are miscounted";
    backed += frames_[i].memory != 0 ? 1 : 0;
    busy += frames_[i].busy() ? 1 : 0;
  }
  if (live != live_blocks_ || backed != backed_ || busy != busy_) return "shared frames are miscounted";
  return "";
}

}  // namespace memmgr
