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
constexpr uint64_t kNever = ~uint64_t{0};

// When a frame may be taken: from `from` on, up to `until`.
struct Free {
  uint64_t from, until;
  bool Has(uint64_t birth, uint64_t end) const { return from <= birth && end <= until; }
  // The one that is wanted again soonest, and of these the one that was free last.
  bool TighterThan(const Free& other) const { return until != other.until ? until < other.until : from > other.from; }
};

// Returns frames for a new site: those that are free for the tenant's whole life, the tightest first, then new ones.
std::vector<uint32_t> FramesFor(const Tenant& t, std::vector<Free>* free) {
  std::vector<uint32_t> frames;
  for (uint32_t i = 0; i < free->size(); ++i)
    if ((*free)[i].Has(t.birth, t.birth + t.life)) frames.push_back(i);
  const size_t wanted = std::min<size_t>(t.pages, frames.size());
  std::partial_sort(frames.begin(), frames.begin() + static_cast<std::ptrdiff_t>(wanted), frames.end(),
                    [&](uint32_t a, uint32_t b) {
                      if ((*free)[a].TighterThan((*free)[b])) return true;
                      return !(*free)[b].TighterThan((*free)[a]) && a < b;
                    });
  frames.resize(wanted);
  while (frames.size() < t.pages) {
    frames.push_back(static_cast<uint32_t>(free->size()));
    free->push_back({0, kNever});
  }
  return frames;
}

}  // namespace

Layout share_frames(std::vector<Tenant>* tenants, uint64_t ring) {
  Layout layout;
  std::vector<Free> free;
  std::unordered_map<uint32_t, std::vector<uint32_t>> of_length;  // sites, by pages
  std::vector<Tenant*> order;
  const auto lives_on = [&](const Tenant* t) { return t->birth + t->life > ring; };
  for (Tenant& t : *tenants) order.push_back(&t);
  std::stable_sort(order.begin(), order.end(), [&](const Tenant* a, const Tenant* b) {
    return std::tuple(!lives_on(a), a->birth) < std::tuple(!lives_on(b), b->birth);
  });
  const auto of_site = [&](uint32_t site) {
    Free all{0, kNever};
    for (const uint32_t frame : layout.sites[site]) {
      all.from = std::max(all.from, free[frame].from);
      all.until = std::min(all.until, free[frame].until);
    }
    return all;
  };
  for (Tenant* t : order) {
    const uint64_t end = t->birth + t->life;
    std::vector<uint32_t>& alike = of_length[t->pages];
    t->site = static_cast<uint32_t>(layout.sites.size());
    if (lives_on(t)) {
      std::vector<uint32_t> frames;
      for (uint32_t i = 0; i < t->pages; ++i) {
        frames.push_back(static_cast<uint32_t>(free.size()));
        free.push_back({end - ring, t->birth});
      }
      layout.sites.push_back(std::move(frames));
      alike.push_back(t->site);
      continue;
    }
    Free best{0, kNever};
    bool found = false;
    for (const uint32_t site : alike) {
      const Free one = of_site(site);
      if (!one.Has(t->birth, end) || (found && !one.TighterThan(best))) continue;
      best = one;
      t->site = site;
      found = true;
    }
    if (!found) {
      layout.sites.push_back(FramesFor(*t, &free));
      alike.push_back(t->site);
    }
    for (const uint32_t frame : layout.sites[t->site]) free[frame].from = end;
  }
  layout.frames = static_cast<uint32_t>(free.size());
  return layout;
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
    tenants.push_back({one.birth, end - one.birth, static_cast<uint32_t>((bytes + page_bytes_ - 1) / page_bytes_)});
  }
  if (tenants.size() > kMostTenants) return {};
  out.layout = share_frames(&tenants, ring);
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
