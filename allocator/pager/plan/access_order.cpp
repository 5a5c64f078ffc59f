#include "plan/access_order.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/deferred_drop.h"
#include "base/lock.h"
#include "base/no_destructor.h"
#include "base/tensors.h"
#include "cells/cell.h"
#include "cells/copies.h"
#include "cells/freeze.h"
#include "plan/follow.h"
#include "residency/evict.h"
#include "residency/transfer.h"
#include "residency/victims.h"

namespace memmgr::pager {

namespace {

constexpr uint32_t kRanksOfATurn = 16;  // in one turn the victims are ranked so often
constexpr uint64_t kShareAhead = 8;     // at most this share of the budget is being read ahead of its use

constexpr uint32_t kNear = 32;       // a touch may be at least so many places ahead of the one before
constexpr uint32_t kShareNear = 16;  // or this share of all places
constexpr uint32_t kLostAfter = 8;   // touches that are not near: the program does something else

struct TurnOrder {
  std::vector<Cell*> cells;     // by place, from 1 on; null: the cell has ended
  std::vector<uint32_t> again;  // by place: the place at which the same cell is touched next
  uint32_t astray = 0;          // touches that were not near
  uint64_t hash = 0;
  bool used = false, whole = false;  // whole: no cell of it has ended
  uint32_t at = 1, ranked_at = 1;
  uint64_t learned = 0, turn_ticks = 0;

  uint32_t count() const { return static_cast<uint32_t>(cells.size()); }
  bool applies() const { return used && count() > 1 && !plan_foretells(); }
  Cell* after(uint32_t places) const { return cells[(at - 1 + places) % count()]; }
  Cell* before(uint32_t places) const { return cells[(at - 1 + count() - places) % count()]; }
  uint32_t places_until(const Cell* c) const REQUIRES(graph_lock()) { return (c->in_turn + count() - at) % count(); }
};

NoDestructor<TurnOrder> turn_order OF_GRAPH;

// Evicts cells that are touched after `until` places. It does not wait for a write.
bool make_room_behind(uint64_t bytes, uint32_t until) {
  uint64_t released = 0;
  for (uint32_t back = 0; released < bytes; ++back) {
    Cell* c;
    {
      const Hold lock(graph_lock());
      const TurnOrder& o = *turn_order;
      if (!o.applies() || back + until >= o.count()) return false;
      c = o.before(back);
      if (!c || c->slot < 0 || !c->resident() || o.places_until(c) <= until || !claim_locked(c)) continue;
    }
    released += evict_claimed(c, EvictedFor::kReadAhead, Way::kOffload);
  }
  return true;
}

// Places are given in the order in which it is called; `close` ends the order.
void add_place_locked(TurnOrder& o, std::vector<uint32_t>& first, Cell* c) REQUIRES(graph_lock()) {
  if (!c || c->small || (!o.cells.empty() && o.cells.back() == c)) return;
  o.cells.push_back(c);
  o.again.push_back(0);
  const uint32_t before = std::exchange(c->in_turn, o.count());
  first.push_back(before ? first[before - 1] : o.count());
  if (before) o.again[before - 1] = o.count();
}

void close_locked(TurnOrder& o, const std::vector<uint32_t>& first) REQUIRES(graph_lock()) {
  for (uint32_t i = 0; i < o.count(); ++i)
    if (o.again[i] == 0) o.cells[i]->in_turn = o.again[i] = first[i];
  o.whole = true;
}

}  // namespace

void learn_order_locked(const Timeline& turn, const std::vector<Cell*>& cells) {
  TurnOrder& o = *turn_order;
  const uint64_t now = ticks();
  o.turn_ticks = now - o.learned;
  o.learned = now;
  if (o.whole && o.hash == turn.hash()) return;
  forget_order_locked();
  std::vector<uint32_t> first;
  std::vector<bool> lives_on(cells.size());
  for (const TouchNote& t : turn.touches) {
    if (t.ordinal >= cells.size()) continue;
    if ((t.flags & kTouchFirst) && !(t.flags & (kTouchMakes | kTouchComes))) lives_on[t.ordinal] = true;
    if (lives_on[t.ordinal]) add_place_locked(o, first, cells[t.ordinal]);
  }
  close_locked(o, first);
  o.hash = turn.hash();
}

void learn_backward_locked(const Timeline& forward, const std::vector<Cell*>& cells) {
  TurnOrder& o = *turn_order;
  o.turn_ticks = 2 * (ticks() - o.learned);
  forget_order_locked();
  std::vector<uint32_t> first;
  for (size_t i = forward.touches.size(); i-- > 0;)
    if (const uint32_t ordinal = forward.touches[i].ordinal; ordinal < cells.size())
      add_place_locked(o, first, cells[ordinal]);
  close_locked(o, first);
  o.hash = 0;
}

void forget_order_locked() {
  TurnOrder& o = *turn_order;
  for (Cell* c : o.cells)
    if (c) c->in_turn = 0;
  o.cells.clear();
  o.again.clear();
  o.at = o.ranked_at = 1;
  o.astray = 0;
  o.whole = false;
}

static void forget_in_order_locked(Cell* c) REQUIRES(graph_lock()) {
  if (!c->in_turn) return;
  TurnOrder& o = *turn_order;
  uint32_t place = c->in_turn;
  do {
    o.cells[place - 1] = nullptr;
    place = o.again[place - 1];
  } while (place != c->in_turn);
  o.whole = false;
}

static const ListensToCells forgets_places({nullptr, &forget_in_order_locked});

void use_order_locked(bool on) { turn_order->used = on; }

void touch_in_order_locked(Cell* c) {
  TurnOrder& o = *turn_order;
  const uint32_t ahead = o.places_until(c);
  if (ahead > std::max(kNear, o.count() / kShareNear) && ++o.astray < kLostAfter) return;
  o.astray = 0;
  o.at = c->in_turn;
  c->in_turn = o.again[c->in_turn - 1];
}

static uint64_t ticks_until_touch_locked(const Cell* c) REQUIRES(graph_lock()) {
  const TurnOrder& o = *turn_order;
  if (!c->in_turn || !o.applies()) return 0;
  const uint32_t places = o.places_until(c);
  return 1 + o.turn_ticks * (places ? places : o.count()) / o.count();
}

static bool order_has_moved_locked() REQUIRES(graph_lock()) {
  const TurnOrder& o = *turn_order;
  return o.applies() && (o.at + o.count() - o.ranked_at) % o.count() > o.count() / kRanksOfATurn;
}

static void order_was_used_locked() REQUIRES(graph_lock()) { turn_order->ranked_at = turn_order->at; }

static const bool foretells =
    (next_touch = {&ticks_until_touch_locked, &order_has_moved_locked, &order_was_used_locked}, true);

// Begins copies of cells that were touched just now and are touched late: their eviction then waits for no write.
static void write_behind(const Session& session) {
  constexpr uint32_t kLooks = 16;
  constexpr size_t kMostWrites = 4;
  const Hold lock(graph_lock());
  const TurnOrder& o = *turn_order;
  if (!o.applies() || !session.may_offload()) return;
  for (uint32_t back = 0; back < std::min(kLooks, o.count()) && writes_under_way().size() < kMostWrites; ++back)
    if (Cell* c = o.before(back); c && o.places_until(c) > o.count() / 4 && c->resident()) begin_write_locked(c);
}

void read_in_order(const Session& session) {
  if (totals.absent_cells.load(std::memory_order_relaxed) == 0 || !session.options.prefetch) return;
  write_behind(session);
  const uint64_t most = mm_arena_budget(session.arena) / kShareAhead;
  uint64_t ahead = 0;
  for (uint32_t places = 1;; ++places) {
    Cell* c;
    StoragePtr held;
    {
      const Hold lock(graph_lock());
      const TurnOrder& o = *turn_order;
      for (;; ++places) {
        if (!o.applies() || places >= o.count() || ahead >= most) return;
        c = o.after(places);
        if (!c) continue;
        ahead += c->nbytes;
        if (c->resident() || c->reading || c->absence != Absence::kOffloaded || c->slot < 0) continue;
        held = hold(c);
        if (held) break;
      }
    }
    const bool begun = begin_read(c) || (make_room_behind(c->nbytes, places) && begin_read(c));
    drop(std::move(held));
    if (!begun) return;
  }
}

}  // namespace memmgr::pager
