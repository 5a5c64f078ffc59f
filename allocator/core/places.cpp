#include "places.h"

#include <algorithm>
#include <map>
#include <new>
#include <tuple>
#include <unordered_map>

namespace memmgr {
namespace {

constexpr size_t kMostTenants = 16384;     // a longer period has no sites
constexpr uint64_t kMostComputations = 8;  // nor has a sequence that goes on changing
constexpr uint64_t kDisplacedShare = 64;   // a period misses its sites from so much of their bytes on
constexpr int kMissesInARow = 2;           // the first period after a computation has blocks of the one before
constexpr uint64_t kLeastTailShare = 64;   // of a frame: a shorter tail is not kept
constexpr uint64_t kNever = ~uint64_t{0};

// When a part of a frame may be taken: from `from` on, up to `until`.
struct Free {
  uint64_t from = 0, until = kNever;
  bool Has(uint64_t birth, uint64_t end) const { return from <= birth && end <= until; }
  bool Always() const { return from == 0 && until == kNever; }
  Free And(const Free& other) const { return {std::max(from, other.from), std::min(until, other.until)}; }
  // The one that is wanted again soonest, and of these the one that was free last.
  bool TighterThan(const Free& other) const { return until != other.until ? until < other.until : from > other.from; }
};

struct Frame {
  uint64_t split;  // the length of its head; that of a frame: it has no tail
  Free head, tail;
};

class Sharing {
 public:
  Sharing(uint64_t ring, uint64_t frame_bytes) : ring_(ring), frame_bytes_(frame_bytes) {}

  Layout Share(std::vector<Tenant>* tenants) {
    std::vector<Tenant*> order;
    for (Tenant& t : *tenants) order.push_back(&t);
    std::stable_sort(order.begin(), order.end(), [&](const Tenant* a, const Tenant* b) {
      return std::tuple(!LivesOn(*a), a->birth) < std::tuple(!LivesOn(*b), b->birth);
    });
    std::unordered_map<uint64_t, std::vector<uint32_t>> alike;  // sites, by bytes
    for (Tenant* t : order) {
      if (LivesOn(*t) || !Reuse(alike[t->bytes], t)) {
        t->site = static_cast<uint32_t>(layout_.sites.size());
        layout_.sites.push_back(Make(*t));
        alike[t->bytes].push_back(t->site);
      }
      const SiteFrames& site = layout_.sites[t->site];
      for (size_t i = 0; i < site.frames.size(); ++i) Take(site.frames[i], site.parts[i], *t);
    }
    layout_.frames = static_cast<uint32_t>(frames_.size());
    return std::move(layout_);
  }

 private:
  bool LivesOn(const Tenant& t) const { return t.birth + t.life > ring_; }

  Free Of(uint32_t frame, FrameParts parts) const {
    const Frame& f = frames_[frame];
    if (parts == kFrameHead) return f.head;
    if (parts == kFrameTail) return f.tail;
    return f.head.And(f.tail);
  }

  // One that lives on is in the way before its end in the next period and after its birth in this one.
  bool Fits(const Free& free, const Tenant& t) const {
    return LivesOn(t) ? free.Always() : free.Has(t.birth, t.birth + t.life);
  }

  void Take(uint32_t frame, FrameParts parts, const Tenant& t) {
    const uint64_t end = t.birth + t.life;
    const auto take = [&](Free* part) { *part = LivesOn(t) ? Free{end - ring_, t.birth} : Free{end, part->until}; };
    if ((parts & kFrameHead) != 0) take(&frames_[frame].head);
    if ((parts & kFrameTail) != 0) take(&frames_[frame].tail);
  }

  // Finds the site that is wanted again soonest, of those that are free.
  bool Reuse(const std::vector<uint32_t>& sites, Tenant* t) const {
    Free best;
    bool found = false;
    for (const uint32_t number : sites) {
      const SiteFrames& site = layout_.sites[number];
      Free one;
      for (size_t i = 0; i < site.frames.size(); ++i) one = one.And(Of(site.frames[i], site.parts[i]));
      if (!Fits(one, *t) || (found && !one.TighterThan(best))) continue;
      best = one;
      t->site = number;
      found = true;
    }
    return found;
  }

  SiteFrames Make(const Tenant& t) {
    SiteFrames site;
    uint64_t left = t.bytes;
    const uint64_t end = left % frame_bytes_;
    if (const uint32_t tail = end > 0 ? TailFor(t, end) : kNone; tail != kNone) {
      site.start = frames_[tail].split;
      Add(&site, tail, kFrameTail);
      left -= frame_bytes_ - site.start;
    }
    for (const uint32_t frame : WholeFrames(t, left / frame_bytes_, site)) Add(&site, frame, kWholeFrame);
    if (const uint64_t head = left % frame_bytes_; head > 0) {
      const uint32_t frame = HeadFor(t, head, site);
      Add(&site, frame, frames_[frame].split < frame_bytes_ ? kFrameHead : kWholeFrame);
    }
    return site;
  }

  static bool Has(const SiteFrames& site, uint32_t frame) {
    return std::find(site.frames.begin(), site.frames.end(), frame) != site.frames.end();
  }

  static void Add(SiteFrames* site, uint32_t frame, FrameParts parts) {
    site->frames.push_back(frame);
    site->parts.push_back(parts);
  }

  // The shortest tail of so many bytes that is free, and of these the tightest.
  uint32_t TailFor(const Tenant& t, uint64_t bytes) const {
    uint32_t best = kNone;
    for (uint32_t i = 0; i < frames_.size(); ++i) {
      const Frame& f = frames_[i];
      if (frame_bytes_ - f.split < bytes || !Fits(f.tail, t)) continue;
      if (best == kNone || f.split > frames_[best].split ||
          (f.split == frames_[best].split && f.tail.TighterThan(frames_[best].tail)))
        best = i;
    }
    return best;
  }

  // Frames that are free for the tenant's whole life, the tightest first, then new ones.
  std::vector<uint32_t> WholeFrames(const Tenant& t, uint64_t count, const SiteFrames& site) {
    std::vector<uint32_t> found;
    for (uint32_t i = 0; i < frames_.size(); ++i)
      if (Fits(Of(i, kWholeFrame), t) && !Has(site, i)) found.push_back(i);
    const size_t wanted = std::min<size_t>(count, found.size());
    std::partial_sort(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(wanted), found.end(),
                      [&](uint32_t a, uint32_t b) {
                        const Free one = Of(a, kWholeFrame), other = Of(b, kWholeFrame);
                        if (one.TighterThan(other)) return true;
                        return !other.TighterThan(one) && a < b;
                      });
    found.resize(wanted);
    while (found.size() < count) found.push_back(NewFrame());
    return found;
  }

  // A frame for the last bytes: the shortest head that is free and long enough, else a frame that is split here.
  uint32_t HeadFor(const Tenant& t, uint64_t bytes, const SiteFrames& site) {
    uint32_t best = kNone;
    for (uint32_t i = 0; i < frames_.size(); ++i) {
      const Frame& f = frames_[i];
      if (f.split == frame_bytes_ || f.split < bytes || !Fits(f.head, t) || Has(site, i)) continue;
      if (best == kNone || f.split < frames_[best].split) best = i;
    }
    if (best != kNone) return best;
    for (uint32_t i = 0; i < frames_.size(); ++i) {
      const bool unsplit = frames_[i].split == frame_bytes_;
      if (!unsplit || !Fits(frames_[i].head, t) || Has(site, i)) continue;
      if (best == kNone || frames_[i].head.TighterThan(frames_[best].head)) best = i;
    }
    if (best == kNone) best = NewFrame();
    if (frame_bytes_ - bytes >= frame_bytes_ / kLeastTailShare) frames_[best].split = bytes;
    return best;
  }

  uint32_t NewFrame() {
    frames_.push_back({frame_bytes_, {}, {}});
    return static_cast<uint32_t>(frames_.size() - 1);
  }

  static constexpr uint32_t kNone = ~uint32_t{0};
  const uint64_t ring_, frame_bytes_;
  Layout layout_;
  std::vector<Frame> frames_;
};

}  // namespace

Layout share_frames(std::vector<Tenant>* tenants, uint64_t ring, uint64_t frame_bytes) {
  return Sharing(ring, frame_bytes).Share(tenants);
}

void Places::Note(const Event& event) {
  if (!now_.whole) return;
  try {
    now_.events.push_back(event);
  } catch (const std::bad_alloc&) {
    now_.whole = false;
  }
}

bool Places::Begin(uint64_t page_bytes) {
  page_bytes_ = page_bytes;
  stats_.asked_bytes = asked_;
  stats_.displaced_bytes = displaced_;
  // Blocks without a site want other sites, and then it is not known how much memory these will lack. In the first
  // period blocks of the one before have some of it. But where sites lacked memory before, blocks have no site because
  // the program has waited for memory and asks for them at other positions: sites of such a period would not be those
  // of the next one, so they stay until the plan leaves room for them.
  const bool missed = rows_.empty() || siteless_ > asked_ / kDisplacedShare;
  short_ = lacked_ > 0 && (short_ || !missed);
  // A block whose site lacks memory lies elsewhere, and takes memory from sites there: that is no second lack.
  const uint64_t lacked = short_ ? lacked_ : missed ? 0 : taken_;
  stats_.lacking_periods = lacked > 0 ? stats_.lacking_periods + 1 : 0;
  stats_.lacking_bytes = lacked;
  misses_ = missed && !short_ ? misses_ + 1 : 0;
  older_ = std::move(last_);
  last_ = std::move(now_);
  now_ = {{}, true};
  position_ = 0;
  asked_ = displaced_ = siteless_ = 0;
  lacked_ = taken_ = 0;
  for (Row& row : rows_) row.used = false;
  ++age_;
  return misses_ >= kMissesInARow && last_.whole && older_.whole && stats_.computations < kMostComputations;
}

Places::Computed Places::Compute() const {
  using Request = std::tuple<uint32_t, uint64_t, uint32_t>;  // position, bytes, how many like it came before
  using Counts = std::map<std::pair<uint32_t, uint64_t>, uint32_t>;
  // The blocks that lived when the last period began, by the request that made them.
  std::unordered_map<uint64_t, Request> made;
  Counts counts;
  for (const Event& e : older_.events) {
    if (e.bytes == 0)
      made.erase(e.offset);
    else
      made[e.offset] = {e.position, e.bytes, counts[{e.position, e.bytes}]++};
  }
  std::map<Request, uint64_t> before;  // the offset
  for (const auto& [offset, request] : made) before[request] = offset;

  struct Life {
    Request request;
    uint64_t birth, end;
  };
  const uint64_t ring = last_.events.size();
  std::vector<Life> lives;
  std::unordered_map<uint64_t, size_t> live;
  std::unordered_map<uint64_t, uint64_t> ends;  // of blocks from before the period, by offset
  counts.clear();
  for (uint64_t moment = 0; moment < ring; ++moment) {
    const Event& e = last_.events[moment];
    if (e.bytes != 0) {
      live[e.offset] = lives.size();
      lives.push_back({{e.position, e.bytes, counts[{e.position, e.bytes}]++}, moment, kNever});
    } else if (const auto mine = live.find(e.offset); mine != live.end()) {
      lives[mine->second].end = moment;
      live.erase(mine);
    } else {
      ends[e.offset] = moment;
    }
  }
  std::vector<Tenant> tenants;
  Computed out;
  for (const Life& one : lives) {
    const auto& [position, bytes, number] = one.request;
    if (bytes < page_bytes_) continue;
    uint64_t end = one.end;
    if (end == kNever) {
      // It ends in the next period, at the moment at which the one that the period before made has ended in this one.
      const auto same = before.find(one.request);
      const auto ended = same != before.end() ? ends.find(same->second) : ends.end();
      if (ended == ends.end() || ended->second > one.birth) continue;  // of these ever more live, or two at a time
      end = ended->second + ring;
    }
    out.rows.push_back({position, bytes, 0});
    tenants.push_back({one.birth, end - one.birth, bytes});
  }
  if (tenants.size() > kMostTenants) return {};
  out.layout = share_frames(&tenants, ring, page_bytes_);
  for (size_t i = 0; i < tenants.size(); ++i) out.rows[i].site = tenants[i].site;
  return out;
}

void Places::Use(std::vector<Row> rows, uint32_t frames) {
  rows_ = std::move(rows);
  stats_.rows = rows_.size();
  stats_.frames = frames;
  age_ = 0;
  short_ = false;
  stats_.computations = rows_.empty() ? kMostComputations : stats_.computations + 1;
  misses_ = 0;
}

size_t Places::Next(uint64_t bytes) const {
  auto row = std::lower_bound(rows_.begin(), rows_.end(), position_,
                              [](const Row& one, uint32_t position) { return one.position < position; });
  for (; row != rows_.end() && row->position == position_; ++row)
    if (row->bytes == bytes && !row->used) return static_cast<size_t>(row - rows_.begin());
  return kNone;
}

size_t Places::SiteOf(uint64_t bytes) const {
  const size_t row = Next(bytes);
  return row != kNone ? rows_[row].site : kNone;
}

void Places::Taken(uint64_t offset, uint64_t bytes, bool sited) {
  if (const size_t row = Next(bytes); row != kNone) rows_[row].used = true;
  if (bytes >= page_bytes_) {
    asked_ += bytes;
    if (!sited) displaced_ += bytes;
    if (!sited && lacked_ == 0) siteless_ += bytes;
  }
  Note({position_, offset, bytes});
}

}  // namespace memmgr
