#include "plan/timeline.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "base/clock.h"
#include "base/lock.h"
#include "base/module_of_op.h"
#include "base/no_destructor.h"
#include "cells/cell.h"
#include "pools/pool.h"
#include "pools/scratch.h"

namespace memmgr::pager {

std::atomic<bool> timeline_on{false};
std::atomic<bool> times_ops{false};

namespace {

// The last turn of a loop that equalled the turn before it.
struct Steady {
  uint64_t hash = 0;
  std::vector<std::pair<uint32_t, Cell*>> cells;  // by ordinal, the cells that live on; null: the cell has ended
  uint64_t until = 0;                             // cells with this serial or a later one were made after the turn
};

struct Periods {
  Period now;
  Steady steady;
  uint32_t timed = 0;  // periods that were timed since the budget opened
};

NoDestructor<Periods> periods OF_GRAPH;

uint64_t mixed(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9E3779B97F4A7C15ull + (hash << 6) + (hash >> 2);
  return hash * 0xD6E8FEB86659FD93ull;
}

// Returns the ordinal of a cell. A cell without one gets the next.
uint32_t ordinal_locked(Period& p, Cell* c, bool* first) REQUIRES(graph_lock()) {
  *first = c->period != p.number;
  if (*first) {
    const bool known = c->period + 1 == p.number && c->ordinal < p.previous.size() && p.previous[c->ordinal] == c;
    p.noted.prior.push_back(known ? c->ordinal : kNoOrdinal);
    c->period = p.number;
    c->ordinal = static_cast<uint32_t>(p.live.size());
    p.live.push_back(c);
    p.noted.sizes.push_back(c->nbytes);
    p.noted.fixed.push_back(c->escape != Escape::kNone);
  }
  return c->ordinal;
}

// The first periods of a budget are timed, since plans are made of them, and later one in 16. Two points cost an op two
// microseconds (an H100's host: 0.9 each).
constexpr uint32_t kTimedPeriods = 8, kTimedAgain = 16;

void time_ops_locked(const Pool* pool, Period& p, bool noted) REQUIRES(graph_lock()) {
  mm_device* device = noted && pool ? pool->queue() : nullptr;
  const bool timed = device && (periods->timed++ < kTimedPeriods || p.number % kTimedAgain == 0);
  if (timed)
    p.noted.points = std::shared_ptr<mm_points>(mm_points_begin(device), [](mm_points* points) {
      if (points) mm_points_end(points);
    });
  times_ops = p.noted.points != nullptr;
}

}  // namespace

Period& period_locked() { return periods->now; }

uint32_t begin_op_locked(const Session& session, Period& p, OpInfo* info, uint64_t now) {
  OpNote note{info, static_cast<uint32_t>(p.noted.touches.size())};
  if (p.last_end && now > p.last_end) note.before = static_cast<float>(seconds_of_ticks(now - p.last_end));
  const uint64_t all = mm_arena_resident(session.arena), paged = totals.resident_cell_bytes.load();
  note.other = all - std::min(all, paged);
  note.module = current_module();
  p.noted.ops.push_back(note);
  p.running = mixed(p.running, reinterpret_cast<uintptr_t>(info));
  return static_cast<uint32_t>(p.noted.ops.size() - 1);
}

void touch_locked(Period& p, Cell* c, bool written, bool made) {
  bool first;
  const uint32_t ordinal = ordinal_locked(p, c, &first);
  const auto flags =
      static_cast<uint8_t>((written ? kTouchWrites : 0) | (made ? kTouchMakes : 0) | (first ? kTouchFirst : 0));
  const uint8_t comes = first && !made && c->serial >= p.begun ? kTouchComes : 0;
  p.noted.touches.push_back({ordinal, static_cast<uint8_t>(flags | comes)});
  p.running = mixed(mixed(p.running, ordinal * 16ull + flags), p.loop ? 0 : c->nbytes);
}

Timeline begin_next_locked(const Session& session, Period& p, bool noted) {
  const uint64_t trials = session.counters.trials.load();
  Timeline ended = std::move(p.noted);
  ended.trials = trials - p.trials_before;
  const uint32_t number = p.number + 1;
  std::vector<Cell*> previous = std::move(p.live);
  p = Period();
  p.number = number;
  p.previous = std::move(previous);
  p.noted.before = ended.overflow ? 0 : ended.hash();
  p.trials_before = trials;
  p.begun = serial_of_next_locked();
  timeline_on = noted;
  time_ops_locked(session.pool, p, noted);
  return ended;
}

void keep_steady_locked(const Timeline& turn, const Period& p) {
  Steady& s = periods->steady;
  s.hash = turn.hash();
  s.until = serial_of_next_locked();
  s.cells.clear();
  for (uint32_t i = 0; i < p.previous.size(); ++i)
    if (p.previous[i]) s.cells.emplace_back(i, p.previous[i]);
}

void forget_steady_locked() {
  periods->steady = Steady();
  periods->timed = 0;
}

void OpTimer::begin(const Pool& pool, const OpInfo* info) {
  {
    const Hold lock(graph_lock());
    points_ = period_locked().noted.points;
  }
  if (!points_) return;  // the period has ended in between
  pool_ = &pool;
  if (const uint32_t delay = info->delay_nanoseconds.load(std::memory_order_relaxed)) {
    delayed_ = mm_points_add(points_.get(), pool.stream());
    if (mm_device_delay(pool.queue(), delay, pool.stream()) != 0) delayed_ = -1;
  }
  begins_ = mm_points_add(points_.get(), pool.stream());
  Taking& here = taking();
  here.points = points_.get();
  here.searches.clear();
}

void OpTimer::end_timed() {
  taking().points = nullptr;
  ends_ = mm_points_add(points_.get(), pool_->stream());
}

OpTimer::~OpTimer() {
  if (C10_UNLIKELY(points_ != nullptr) && ends_ < 0) end_timed();  // the op has failed
}

void OpTimer::tell(Timeline* t, size_t op) const {
  if (C10_LIKELY(!points_) || points_ != t->points) return;
  t->ops[op].begins = begins_;
  t->ops[op].ends = ends_;
  t->ops[op].delayed = delayed_;
  for (const auto& [from, to] : taking().searches) t->searches.push_back({op, from, to});
}

namespace {

// The least times of the ops that are alike: their cells have the same sizes. Negative: not known.
struct LeastTimes {
  float device = -1, host = -1;
  float before = -1;      // between the op before and this one
  float after_idle = -1;  // of the device, if it was idle before: less the host's launch, which may be too much
  int delays = 0;         // that were too short

  static void lower(float* least, float took) {
    if (took >= 0) *least = *least < 0 ? took : std::min(*least, took);
  }
};

uint64_t alike(const Timeline& t, size_t op) {
  const size_t end = op + 1 < t.ops.size() ? t.ops[op + 1].first_touch : t.touches.size();
  uint64_t key = mixed(0, reinterpret_cast<uintptr_t>(t.ops[op].info));
  for (size_t k = t.ops[op].first_touch; k < end; ++k) key = mixed(key, t.sizes[t.touches[k].ordinal]);
  return key;
}

constexpr float kIdleSeconds = 2e-6F;      // between two ops: less is the device's own pace
constexpr float kLeastSeconds = 2e-6F;     // of a kernel
constexpr float kMostLaunching = 100e-6F;  // the host has waited for the device in an op that takes longer

constexpr float kLaunching = 10e-6F;  // between a point and the end of the call that launches a delay behind it
constexpr float kMostDelay = 2e-3F;
constexpr int kMostDelays = 3;

struct OpTimes {
  float device, host, gap;
  bool waits;  // the host does, for the device
};

// Ops that have only met an idle device are delayed when they are timed next: twice as long as the host took to launch
// them.
void delay(OpInfo* info, float launching) {
  const float seconds = std::min(2 * (launching + kLaunching), kMostDelay);
  const auto nanoseconds = static_cast<uint32_t>(1e9F * seconds);
  if (nanoseconds > info->delay_nanoseconds.load(std::memory_order_relaxed)) info->delay_nanoseconds = nanoseconds;
}

// The slower of both sets the pace. The host is ahead of a slower device, which is then idle only where the host has
// waited for it. True: the device is the slower one.
bool set_pace(Timeline* t, const std::vector<OpTimes>& times) {
  double device = 0, host = 0;
  for (size_t i = 0; i < times.size(); ++i) {
    device += times[i].device;
    host += times[i].host + t->ops[i].before;
  }
  bool waited = false;
  for (size_t i = 0; i < times.size(); ++i) {
    OpNote& op = t->ops[i];
    const OpTimes& of = times[i];
    if (device >= host) {
      op.seconds = of.device;
      op.before = waited ? of.gap : 0;
    } else {
      op.seconds = std::max(of.device, of.host);
    }
    waited = of.waits;
  }
  return device >= host;
}

NoDestructor<std::unordered_map<uint64_t, LeastTimes>> least_times GUARDED_BY(lock_of(LockId::kDeviceTimes));

}  // namespace

void take_device_times(Timeline* t) {
  const std::shared_ptr<mm_points> points = std::move(t->points);
  t->of_device = true;
  constexpr size_t kMostKnown = 1 << 16;
  const Hold hold(lock_of(LockId::kDeviceTimes));
  if (least_times->size() > kMostKnown) least_times->clear();
  const auto between = [&](int from, int to) {
    return from < 0 ? -1.0F : static_cast<float>(mm_points_between(points.get(), from, to));
  };
  std::vector<OpTimes> times;
  int last = -1;
  if (points)
    for (const OpNote& op : t->ops) op.info->delay_nanoseconds = 0;
  auto search = t->searches.begin();
  for (size_t i = 0; i < t->ops.size(); ++i) {
    OpNote& op = t->ops[i];
    OpTimes of{op.seconds, op.seconds, op.before, false};
    LeastTimes& least = (*least_times)[alike(*t, i)];
    float searching = 0, searches = 0;
    for (; search != t->searches.end() && search->op == i; ++search, ++searches)
      searching += std::max(0.0F, between(search->from, search->to));
    if (points && op.begins >= 0 && op.ends >= 0) {
      const float took = between(op.begins, op.ends) - searching;
      const float gap = between(last, op.delayed >= 0 ? op.delayed : op.begins);
      const float delayed = between(op.delayed, op.begins);
      // The host had queued all kernels of the op before the delay ended.
      const bool covered = delayed > op.seconds + kLaunching && searching <= searches * kIdleSeconds;
      last = op.ends;
      if (gap >= 0) {  // the program may have waited for the device between two ops
        op.before = std::min(op.before, gap + kMostLaunching);
        of.gap = std::min(of.gap, gap);
      }
      of.waits = op.seconds > std::max(took, 0.0F) + kMostLaunching;
      // A device that was idle had nothing to do until the host had launched the op's first kernel.
      if (!covered && took > kLeastSeconds && (gap > kIdleSeconds || delayed >= 0) && !of.waits)
        LeastTimes::lower(&least.after_idle, std::max(took - op.seconds, kLeastSeconds));
      else
        LeastTimes::lower(&least.device, took);
      if (delayed >= 0 && !covered) least.delays++;
      if (least.device < 0 && !of.waits && least.delays < kMostDelays) delay(op.info, op.seconds);
      LeastTimes::lower(&least.before, op.before);
      LeastTimes::lower(&least.host, std::min(op.seconds, std::max(took, 0.0F) + kMostLaunching));
    }
    if (least.host >= 0) {
      of.device = least.device >= 0 ? least.device : std::max(0.0F, least.after_idle);
      of.host = least.host;
      if (!points) op.before = std::min(op.before, least.before);  // it may be the pager's work after the op before
    }
    times.push_back(of);
  }
  // A plan for a slow host takes the host's times for most ops.
  if (!set_pace(t, times))
    for (const OpNote& op : t->ops) op.info->delay_nanoseconds = 0;
}

static void forget_in_timeline_locked(Cell* c) REQUIRES(graph_lock()) {
  Period& p = period_locked();
  if (Steady& s = periods->steady; c->serial < s.until) {
    for (auto& [ordinal, cell] : s.cells)
      if (cell == c) cell = nullptr;
  }
  uint32_t prior = kNoOrdinal;
  if (c->period == p.number && c->ordinal < p.live.size()) {
    p.live[c->ordinal] = nullptr;
    prior = p.noted.prior[c->ordinal];
  } else if (c->period + 1 == p.number) {
    prior = c->ordinal;
  }
  if (prior < p.previous.size() && p.previous[prior] == c) p.previous[prior] = nullptr;
}

static void note_death_locked(const Cell* c) REQUIRES(graph_lock()) {
  Period& p = period_locked();
  if (c->period == p.number && timeline_on.load(std::memory_order_relaxed))
    p.noted.deaths.emplace_back(static_cast<uint32_t>(p.noted.ops.size()), c->ordinal);
}

static const ListensToCells notes_cells({&note_death_locked, &forget_in_timeline_locked});

bool was_ordinal_locked(const Version* v, uint32_t ordinal) {
  return v->ordinal == ordinal && v->period == period_locked().number;
}

Cell* cell_of_ordinal_locked(uint32_t ordinal) {
  const std::vector<Cell*>& live = period_locked().live;
  return ordinal < live.size() ? live[ordinal] : nullptr;
}

Cell* cell_before_locked(uint32_t ordinal, uint64_t hash) {
  const Period& p = period_locked();
  if (p.noted.before == hash) return ordinal < p.previous.size() ? p.previous[ordinal] : nullptr;
  const Steady& s = periods->steady;
  if (s.hash != hash) return nullptr;
  const auto found = std::lower_bound(s.cells.begin(), s.cells.end(), ordinal,
                                      [](const auto& at, uint32_t o) { return at.first < o; });
  return found != s.cells.end() && found->first == ordinal ? found->second : nullptr;
}

}  // namespace memmgr::pager
