#include "plan/timeline.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "base/budget.h"
#include "plan/access_order.h"
#include "plan/follow.h"
#include "plan/loops.h"
#include "python/introspection.h"
#include "recipes/recipe.h"

namespace memmgr::pager {

std::atomic<bool> timeline_on{false};
std::atomic<bool> times_ops{false};

namespace {

constexpr size_t kMostOps = 200000;  // what is longer is no period

// Guarded by the graph's lock.
struct Period {
  uint32_t number = 1;
  bool asked = false;  // for: it goes from backward to backward
  bool loop = false;   // it is a turn of a loop, and the same as one whose cells are larger (a cache that grows)
  Timeline noted;
  std::vector<Cell*> live;      // by ordinal
  std::vector<Cell*> previous;  // of the period before, by its ordinals
  uint64_t running = 0x9E3779B97F4A7C15ull;
  uint64_t last_end = 0;  // ticks
  uint64_t trials_before = 0;
  uint64_t begun = 0;  // serials from here on are of cells that came in it
};

Period& period() {
  static auto* p = new Period;
  return *p;
}

// The last turn of a loop that was the same as the one before. Guarded by the graph's lock.
struct Steady {
  uint64_t hash = 0;
  std::vector<std::pair<uint32_t, Cell*>> cells;  // by ordinal, those that live on; null: it has died since
  uint64_t until = 0;                             // serials from here on are of cells that came later
};

Steady& steady() {
  static auto* s = new Steady;
  return *s;
}

LoopSeeker& seeker() {
  static auto* s = new LoopSeeker;
  return *s;
}

uint64_t mixed(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9E3779B97F4A7C15ull + (hash << 6) + (hash >> 2);
  return hash * 0xD6E8FEB86659FD93ull;
}

// The ordinal of a cell, given now if it has none.
uint32_t ordinal_locked(Period& p, Cell* c, bool* first) {
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

uint32_t begin_locked(Period& p, OpInfo* info, uint64_t now) {
  OpNote note{info, static_cast<uint32_t>(p.noted.touches.size())};
  if (p.last_end && now > p.last_end) note.before = static_cast<float>(seconds_of_ticks(now - p.last_end));
  const uint64_t all = mm_arena_resident(budget.arena), paged = resident_cell_bytes.load();
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

// The first periods of a budget, of which plans are made, and one in 16 later: two points take an op two microseconds
// (an H100's host: 0.9 each).
constexpr uint32_t kTimedPeriods = 8, kTimedAgain = 16;
uint32_t timed_periods = 0;  // under the graph's lock

uint64_t waits_of_device() {
  mm_device_stats s{};
  mm_device_stats_get(budget.pool->queue(), &s);
  return s.waits;
}

void time_ops_locked(Period& p, bool noted) {
  mm_device* device = noted && budget.pool ? budget.pool->queue() : nullptr;
  const bool timed = device && (timed_periods++ < kTimedPeriods || p.number % kTimedAgain == 0);
  if (timed)
    p.noted.points = std::shared_ptr<mm_points>(mm_points_begin(device), [](mm_points* points) {
      if (points) mm_points_end(points);
    });
  times_ops = p.noted.points != nullptr;
}

Timeline next_locked(Period& p, bool noted) {
  const uint64_t trials = counters.trials.load();
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
  time_ops_locked(p, noted);
  use_order_locked(false);
  return ended;
}

// The turn that ends before this op, or what was noted before a loop was looked for.
std::optional<LoopTurn> turn_locked(Period& p, const OpInfo* info, const Frame& frame) {
  if (c10::GradMode::is_enabled() || p.noted.turn >= 0) return std::nullopt;
  auto how = LoopSeeker::Turn::kCut;
  if (p.loop)
    how = seeker().ends(p.noted, info, frame);
  else if (!seeker().begins(p.asked, p.noted.ops.size(), info, frame))
    return std::nullopt;
  if (how == LoopSeeker::Turn::kGoesOn) return std::nullopt;
  const uint64_t last_end = p.last_end;
  LoopTurn turn{next_locked(p, true), how == LoopSeeker::Turn::kWhole};
  seeker().cut(turn.ended.ops.size(), turn.whole && turn.ended.before == turn.ended.hash());
  p.loop = true;
  if (turn.whole) learn_order_locked(turn.ended, p.previous);
  if (turn.whole && turn.ended.before == turn.ended.hash()) {
    Steady& s = steady();
    s.hash = turn.ended.hash();
    s.until = serial_of_next_locked();
    s.cells.clear();
    for (uint32_t i = 0; i < p.previous.size(); ++i)
      if (p.previous[i]) s.cells.emplace_back(i, p.previous[i]);
  }
  use_order_locked(true);
  p.last_end = last_end;  // what the program did since then is a part of its turn
  if (!turn.whole) p.noted.before = 0;
  return turn;
}

}  // namespace

void Moment::begins(OpInfo* info, const Frame& frame, bool follow) {
  const uint64_t now = ticks();
  uint32_t at;
  {
    std::unique_lock<std::mutex> lock(graph_lock());
    Period& p = period();
    if (std::optional<LoopTurn> turn = turn_locked(p, info, frame)) {
      lock.unlock();
      end_turn(std::move(*turn));
      lock.lock();
    }
    if (p.noted.ops.size() >= kMostOps) {
      p.noted.overflow = true;
      timeline_on = false;
      return;
    }
    at = begin_locked(p, info, now);
    for (const Touched& t : frame.cells()) {
      touch_locked(p, t.cell, t.written, false);
      if (t.cell->in_turn) touch_in_order_locked(t.cell);
    }
    p.noted.hashes.push_back(p.running);
    position_ = at;
    follow_position_locked(at, p.running, p.noted.before);
  }
  if (follow) follow_before(at);
}

void Moment::ended(OpInfo* info, Cell* const* made, size_t n, double seconds, uint64_t scratch, const OpTimer& timer) {
  if (position_ < 0) {
    if (n == 0) return;
    begins(info, Frame(), false);  // it has run: what is due comes with the next op
    if (position_ < 0) return;
  }
  std::lock_guard<std::mutex> lock(graph_lock());
  Period& p = period();
  const auto at = static_cast<size_t>(position_);
  if (at + 1 != p.noted.ops.size()) return;  // another thread's op came between, or the period has ended
  OpNote& note = p.noted.ops[at];
  // What nobody has written yet costs nothing to have again.
  const auto tell_recipe = [](TouchNote* t, const Cell* c) {
    const Version* v = c->version;
    if (v && (v->recipe || v->uninitialized)) t->flags |= kTouchRecipe;
    if (v && v->recipe) t->bits = static_cast<uint32_t>(v->recipe->kind->bits_bytes.load());
  };
  for (size_t i = note.first_touch; i < p.noted.touches.size(); ++i) {
    TouchNote& t = p.noted.touches[i];
    if ((t.flags & kTouchWrites) && p.live[t.ordinal]) tell_recipe(&t, p.live[t.ordinal]);
  }
  uint64_t bytes = 0;
  for (size_t i = 0; i < n; ++i) {
    if (made[i]->period == p.number) continue;  // the same twice
    touch_locked(p, made[i], false, true);
    tell_recipe(&p.noted.touches.back(), made[i]);
    bytes += made[i]->nbytes;
  }
  note.seconds = static_cast<float>(seconds);
  timer.tell(&note, p.noted.points);
  note.scratch = scratch > bytes ? scratch - bytes : 0;
  p.last_end = ticks();
  ended_ = true;
}

void Moment::left() {
  if (!ended_) return;
  follow_after(static_cast<uint32_t>(position_));
  read_in_order();
}

void OpTimer::begin() {
  {
    std::lock_guard<std::mutex> lock(graph_lock());
    points_ = period().noted.points;
  }
  if (!points_) return;  // the period has ended meanwhile
  waits_ = waits_of_device();
  begins_ = mm_points_add(points_.get(), budget.pool->stream());
}

void OpTimer::end_timed() {
  ends_ = mm_points_add(points_.get(), budget.pool->stream());
  waits_ = waits_of_device() - waits_;
}

void OpTimer::tell(OpNote* note, const std::shared_ptr<mm_points>& points) const {
  if (C10_LIKELY(!points_) || points_ != points) return;
  note->begins = begins_;
  note->ends = ends_;
  note->waited = waits_ > 0;
}

void take_device_times(Timeline* t) {
  const std::shared_ptr<mm_points> points = std::move(t->points);
  if (!points) return;
  struct Least {
    float clean = -1, waited = -1;
  };
  static std::mutex lock;
  static auto* known = new std::unordered_map<uint64_t, Least>;
  constexpr size_t kMostKnown = 1 << 16;
  std::lock_guard<std::mutex> hold(lock);
  if (known->size() > kMostKnown) known->clear();
  int last = -1;
  for (size_t i = 0; i < t->ops.size(); ++i) {
    OpNote& op = t->ops[i];
    if (op.begins < 0 || op.ends < 0) continue;
    const size_t end = i + 1 < t->ops.size() ? t->ops[i + 1].first_touch : t->touches.size();
    uint64_t key = mixed(0, reinterpret_cast<uintptr_t>(op.info));
    for (size_t k = op.first_touch; k < end; ++k) key = mixed(key, t->sizes[t->touches[k].ordinal]);
    Least& like = (*known)[key];
    const auto took = static_cast<float>(mm_points_between(points.get(), op.begins, op.ends));
    float& least = op.waited ? like.waited : like.clean;
    if (took >= 0) least = least < 0 ? took : std::min(least, took);
    if (like.clean >= 0 || like.waited >= 0) op.seconds = like.clean >= 0 ? like.clean : like.waited;
    // The host may be far ahead: then the device is not idle while it is between two ops.
    const double gap = last < 0 ? -1 : mm_points_between(points.get(), last, op.begins);
    if (gap >= 0) op.before = std::min(op.before, static_cast<float>(gap));
    last = op.ends;
  }
}

void forget_in_timeline_locked(Cell* c) {
  Period& p = period();
  seeker().forget(c);
  forget_in_order_locked(c);
  if (Steady& s = steady(); c->serial < s.until) {
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

void note_death_locked(const Cell* c) {
  Period& p = period();
  if (c->period == p.number && timeline_on.load(std::memory_order_relaxed))
    p.noted.deaths.emplace_back(static_cast<uint32_t>(p.noted.ops.size()), c->ordinal);
}

void note_ghost_locked(Version* v, const Cell* c) {
  v->period = c->period;
  v->ordinal = c->ordinal;
}

bool was_ordinal_locked(const Version* v, uint32_t ordinal) {
  return v->ordinal == ordinal && v->period == period().number;
}

Cell* cell_of_ordinal_locked(uint32_t ordinal) {
  const std::vector<Cell*>& live = period().live;
  return ordinal < live.size() ? live[ordinal] : nullptr;
}

Cell* cell_before_locked(uint32_t ordinal, uint64_t hash) {
  const Period& p = period();
  if (p.noted.before == hash) return ordinal < p.previous.size() ? p.previous[ordinal] : nullptr;
  const Steady& s = steady();
  if (s.hash != hash) return nullptr;
  const auto found = std::lower_bound(s.cells.begin(), s.cells.end(), ordinal,
                                      [](const auto& at, uint32_t o) { return at.first < o; });
  return found != s.cells.end() && found->first == ordinal ? found->second : nullptr;
}

void turn_period() {
  if (!timeline_on.load(std::memory_order_relaxed) && !short_begins_loops.load(std::memory_order_relaxed)) return;
  bool cut;
  {
    std::lock_guard<std::mutex> lock(graph_lock());
    Period& p = period();
    seeker().backward();
    cut = p.loop;
    if (cut) seeker().cut(next_locked(p, false).ops.size(), false);  // a part of a pass is no pass
    p.noted.backwards++;
    if (p.noted.turn < 0) p.noted.turn = static_cast<int64_t>(p.noted.ops.size());
    learn_backward_locked(p.noted, p.live);
    use_order_locked(true);
  }
  if (cut) end_following();
}

Timeline next_period(bool noted) {
  std::lock_guard<std::mutex> lock(graph_lock());
  Period& p = period();
  seeker().passed(p.noted.ops.size());
  Timeline ended = next_locked(p, noted);
  if (noted && !ended.overflow) {
    learn_order_locked(ended, p.previous);
    use_order_locked(true);
  }
  p.asked = noted;
  return ended;
}

void seek_loops(bool on) {
  std::lock_guard<std::mutex> lock(graph_lock());
  seeker().reset(on);
  steady() = Steady();
  timed_periods = 0;
  forget_order_locked();
  use_order_locked(false);
  if (on) begin_wait_for_loop();
  if (on && counters.evictions.load() + counters.offloads.load() > 0) timeline_on = true;
}

}  // namespace memmgr::pager
