#include "residency/victims.h"

#include <algorithm>
#include <chrono>
#include <unordered_map>

#include "base/clock.h"
#include "base/constants.h"
#include "base/deferred_drop.h"
#include "base/link.h"
#include "base/lock.h"
#include "base/no_destructor.h"
#include "base/session.h"
#include "cells/cell.h"
#include "cells/freeze.h"
#include "cells/version.h"
#include "pools/pool.h"
#include "recipes/op_signature.h"
#include "recipes/recipe.h"
#include "residency/floor.h"
#include "residency/score.h"

namespace memmgr::pager {

NextTouch next_touch;

namespace {

struct Victims {
  struct Queued {
    Victim victim;  // no cell: it has ended
    uint64_t touched;
  };
  std::vector<Queued> queue;  // the last is evicted first
  size_t ranked = 0;          // of the queue's cells, when a policy ranked them; 0: malloc did
  uint64_t asked_at = 0;      // ticks at which the policy was given the candidates
};

NoDestructor<Victims> victims OF_GRAPH;

// Records that an order is wanted, for wait_for_pressure().
struct Pressure {
  Lock& lock = lock_of(LockId::kPressure);
  Condition told;
  bool wanted GUARDED_BY(lock) = false;
};

NoDestructor<Pressure> pressure;

void tell_ranker() {
  Pressure& p = *pressure;
  {
    const Hold lock(p.lock);
    p.wanted = true;
  }
  p.told.notify_one();
}

void want_order(const Options& options) {
  if (options.order == Order::kRanked) tell_ranker();
}

double io_seconds(const Cell* c) {
  const Link measured = link();
  const double each = measured.read_seconds_per_byte + (c->slot >= 0 ? 0 : measured.write_seconds_per_byte);
  return each * static_cast<double>(c->nbytes);
}

constexpr double kSumSecondsPerByte = 1.5e-10;  // on one processor; a device's bytes are copied for it

void clear_locked() REQUIRES(graph_lock()) {
  Victims& all = *victims;
  for (const auto& q : all.queue)
    if (q.victim.cell) q.victim.cell->queued_at = -1;
  all.queue.clear();
  all.ranked = 0;
}

void push_locked(Cell* c, Way way, uint64_t touched) REQUIRES(graph_lock()) {
  Victims& all = *victims;
  c->queued_at = static_cast<int32_t>(all.queue.size());
  all.queue.push_back({{c, way}, touched});
}

}  // namespace

bool may_be_dropped_locked(const Cell* c) {
  const Version* v = c->version;
  return c->pool->session.options.may_evict && v && v->recipe && c->lead == 0 && c->storage._unsafe_get_target() &&
         v->recipe->kind->trusted() && recipe_available_locked(v->recipe);
}

bool may_be_packed_locked(const Cell* c) {
  const Version* v = c->version;
  const Options& options = c->pool->session.options;
  if (!c->pool->on_host() || (!options.may_evict && !options.may_offload)) return false;
  if (c->slot >= 0 || c->writing >= 0 || !v || !v->recipe || !v->recipe->kind->bits_bytes.load()) return false;
  return !may_be_dropped_locked(c) || seconds_to_make_locked(v) > kPackSecondsPerByte * static_cast<double>(c->nbytes);
}

// Rematerialization needs room for the recipe's inputs and outputs at the time of the restore. Bytes that cannot be
// evicted may have grown by then: a pipeline's sends are in flight until its step ends.
static bool has_room_again_locked(const Cell* c) REQUIRES(graph_lock()) {
  const Session& session = c->pool->session;
  const uint64_t limit = mm_arena_budget(session.arena);
  uint64_t bytes = bytes_that_stay(session) + limit / 8;
  for (const Version* v : c->version->recipe->outputs) bytes += v ? v->nbytes : 0;
  for (const TensorArg& a : c->version->recipe->tensors) bytes += a.version ? a.version->nbytes : 0;
  return bytes <= limit;
}

double cost_of_eviction_locked(const Cell* c, bool* drop) {
  *drop = false;
  double cost = -1;
  if (may_be_packed_locked(c)) return kPackSecondsPerByte * static_cast<double>(c->nbytes);
  if (c->slot >= 0 || c->pool->session.may_offload()) cost = io_seconds(c);
  if (may_be_dropped_locked(c)) {
    double again = seconds_to_make_locked(c->version);
    if (c->version->recipe->checked) again += 2 * kSumSecondsPerByte * static_cast<double>(c->nbytes);
    if (cost < 0 || (again <= cost && has_room_again_locked(c))) {
      *drop = true;
      return again;
    }
  }
  return cost;
}

bool refill_victims_locked(const Session& session) {
  want_order(session.options);
  const uint64_t now = ticks();
  struct Found {
    double score;
    Cell* cell;
  };
  std::vector<Found> found;
  for_each_cell_locked([&](Cell* c) REQUIRES(graph_lock()) {
    if (c->small || c->state.load(std::memory_order_relaxed) != 0) return;
    bool drop;
    const double cost = cost_of_eviction_locked(c, &drop);
    if (cost < 0) return;
    const uint64_t touched = c->last_touch.load(std::memory_order_relaxed);
    const uint64_t foretold = next_touch.ticks_until_locked(c);
    const uint64_t age = foretold ? foretold : now > touched ? now - touched : 0;
    found.push_back({score(session.options.order, cost, c->nbytes, static_cast<double>(age) + 1), c});
  });
  std::sort(found.begin(), found.end(), [](const Found& a, const Found& b) { return a.score > b.score; });
  clear_locked();
  next_touch.was_used_locked();
  for (const Found& f : found) push_locked(f.cell, Way::kCheaper, f.cell->last_touch.load(std::memory_order_relaxed));
  return !found.empty();
}

Victim next_victim_locked(const Session& session) {
  if (is_frozen_locked()) return {};
  Victims& all = *victims;
  if (all.ranked == 0 && next_touch.has_moved_locked()) clear_locked();
  while (!all.queue.empty()) {
    const auto [victim, touched] = all.queue.back();
    all.queue.pop_back();
    if (all.ranked && all.queue.size() == all.ranked / 2) want_order(session.options);  // ahead of need
    Cell* c = victim.cell;
    if (!c) continue;
    c->queued_at = -1;
    if (c->last_touch.load(std::memory_order_relaxed) != touched) continue;  // used since it was ranked
    if (begin_move(c)) return victim;
  }
  return {};
}

std::vector<Victim> choose_victims_locked(const Session& session, uint64_t need, uint64_t request) {
  constexpr int kRounds = 8;  // other threads may have pinned all victims since: the search then runs again
  if (is_frozen_locked()) return {};
  std::vector<mm_price> prices;
  for_each_cell_locked([&](Cell* c) REQUIRES(graph_lock()) {
    if (c->small || c->state.load(std::memory_order_relaxed) != 0 || !mm_arena_owns(session.arena, block_of(c))) return;
    bool drop;
    prices.push_back({block_of(c), c, cost_of_eviction_locked(c, &drop),
                      seconds_of_ticks(c->last_touch.load(std::memory_order_relaxed))});
  });
  mm_arena_price(session.arena, prices.data(), prices.size());
  std::vector<mm_victim> found(256);
  for (int round = 0; round < kRounds; ++round) {
    int64_t n;
    const double now = seconds_of_ticks(ticks());
    while ((n = mm_arena_choose(session.arena, need, request, now, found.data(), found.size())) >
           static_cast<int64_t>(found.size()))
      found.resize(static_cast<size_t>(n));
    if (n <= 0) return {};
    std::vector<Victim> claimed;
    std::vector<mm_price> taken;
    for (int64_t i = 0; i < n; ++i) {
      const mm_victim& v = found[static_cast<size_t>(i)];
      auto* c = static_cast<Cell*>(v.owner);  // the cell lives: its price ends with it, under this lock
      if (begin_move(c))
        claimed.push_back({c, Way::kCheaper});
      else
        taken.push_back({v.p, c, -1, 0});
    }
    if (!claimed.empty()) return claimed;
    mm_arena_price(session.arena, taken.data(), taken.size());
  }
  return {};
}

static void forget_cell_locked(Cell* c) REQUIRES(graph_lock()) {
  if (c->queued_at >= 0) victims->queue[static_cast<size_t>(c->queued_at)].victim.cell = nullptr;
  c->queued_at = -1;
  const Session& session = c->pool->session;
  if (session.options.search && session.arena && c->bytes.get()) mm_arena_disown(session.arena, block_of(c), c);
}
static const ListensToCells forgets_victims({nullptr, &forget_cell_locked});

// ---- for a policy ----

std::vector<Candidate> candidates() {
  std::vector<std::pair<uint64_t, Candidate>> found;
  const Hold lock(graph_lock());
  const uint64_t now = victims->asked_at = ticks();
  for_each_cell_locked([&](Cell* c) REQUIRES(graph_lock()) {
    if (c->small || c->state.load(std::memory_order_relaxed) != 0) return;
    bool drop;
    if (cost_of_eviction_locked(c, &drop) < 0) return;
    const uint64_t touched = c->last_touch.load(std::memory_order_relaxed);
    const bool droppable = may_be_dropped_locked(c);
    const double own = droppable ? seconds_of(c->version->recipe) : 0;
    found.push_back({touched,
                     {c->serial, c->nbytes, seconds_of_ticks(now > touched ? now - touched : 0), own,
                      droppable ? std::max(0.0, seconds_to_make_locked(c->version) - own) : 0, droppable, c->slot >= 0,
                      c->pool->session.may_offload()}});
  });
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<Candidate> columns;
  columns.reserve(found.size());
  for (const auto& [touched, candidate] : found) columns.push_back(candidate);
  return columns;
}

void set_ranking(const std::vector<std::pair<uint64_t, Way>>& ranked) {
  const Hold lock(graph_lock());
  std::unordered_map<uint64_t, Cell*> cells;
  for_each_cell_locked([&](Cell* c) REQUIRES(graph_lock()) {
    if (!c->small) cells.emplace(c->serial, c);
  });
  clear_locked();
  Victims& all = *victims;
  for (size_t i = ranked.size(); i-- > 0;) {
    const auto at = cells.find(ranked[i].first);
    if (at == cells.end() || at->second->queued_at >= 0) continue;
    const uint64_t touched = at->second->last_touch.load(std::memory_order_relaxed);
    if (touched <= all.asked_at) push_locked(at->second, ranked[i].second, touched);
  }
  all.ranked = all.queue.size();
}

void wait_for_pressure() {
  Pressure& p = *pressure;
  Hold lock(p.lock);
  while (!p.wanted) p.told.wait(lock);
  p.wanted = false;
}

void end_wait_for_pressure() { tell_ranker(); }

}  // namespace memmgr::pager
