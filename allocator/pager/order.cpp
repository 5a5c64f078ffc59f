#include "order.h"

#include <algorithm>

#include "budget.h"
#include "follow.h"
#include "hold.h"
#include "reclaim.h"
#include "transfer.h"
#include "victims.h"

namespace memmgr::pager {

namespace {

constexpr uint32_t kRanksOfATurn = 16;  // in a turn the victims are put in order so often
constexpr uint64_t kShareAhead = 8;     // of the budget, at most, is on its way back

struct TurnOrder {
  std::vector<Cell*> cells;  // by place, from 1 on; null: it has died
  uint64_t hash = 0;
  bool used = false, whole = false;  // whole: none has died since
  uint32_t at = 1, ranked_at = 1;
  uint64_t learned = 0, turn_ticks = 0;

  uint32_t count() const { return static_cast<uint32_t>(cells.size()); }
  bool applies() const { return used && count() > 1 && !plan_leads(); }
  Cell* after(uint32_t places) const { return cells[(at - 1 + places) % count()]; }
  Cell* before(uint32_t places) const { return cells[(at - 1 + count() - places) % count()]; }
};

TurnOrder& turn_order() {
  static auto* o = new TurnOrder;
  return *o;
}

// In the room of what is touched after `until` places. Nobody waits for a write.
bool make_room_behind(uint64_t bytes, uint32_t until) {
  uint64_t released = 0;
  for (uint32_t back = 0; released < bytes; ++back) {
    Cell* c;
    {
      std::lock_guard<std::mutex> lock(graph_lock());
      const TurnOrder& o = turn_order();
      if (!o.applies() || back + until >= o.count()) return false;
      c = o.before(back);
      if (!c || c->slot < 0 || !c->resident() || !claim_locked(c)) continue;
    }
    released += leave_claimed(c, Way::kOffload);
  }
  return true;
}

}  // namespace

void learn_order_locked(const Timeline& turn, const std::vector<Cell*>& cells) {
  TurnOrder& o = turn_order();
  const uint64_t now = ticks();
  o.turn_ticks = now - o.learned;
  o.learned = now;
  if (o.whole && o.hash == turn.hash()) return;
  forget_order_locked();
  for (const TouchNote& t : turn.touches) {
    Cell* c = t.ordinal < cells.size() ? cells[t.ordinal] : nullptr;
    if (!c || c->in_turn || c->small || (t.flags & kTouchMakes) || !(t.flags & kTouchFirst)) continue;
    o.cells.push_back(c);
    c->in_turn = o.count();
  }
  o.hash = turn.hash();
  o.whole = true;
}

void forget_order_locked() {
  TurnOrder& o = turn_order();
  for (Cell* c : o.cells)
    if (c) c->in_turn = 0;
  o.cells.clear();
  o.at = o.ranked_at = 1;
  o.whole = false;
}

void forget_in_order_locked(const Cell* c) {
  if (!c->in_turn) return;
  TurnOrder& o = turn_order();
  o.cells[c->in_turn - 1] = nullptr;
  o.whole = false;
}

void use_order_locked(bool on) { turn_order().used = on; }

void order_is_at_locked(uint32_t place) { turn_order().at = place; }

uint64_t ticks_until_touch_locked(const Cell* c) {
  const TurnOrder& o = turn_order();
  if (!c->in_turn || !o.applies()) return 0;
  const uint32_t places = (c->in_turn + o.count() - o.at) % o.count();
  return 1 + o.turn_ticks * (places ? places : o.count()) / o.count();
}

bool order_has_moved_locked() {
  const TurnOrder& o = turn_order();
  return o.applies() && (o.at + o.count() - o.ranked_at) % o.count() > o.count() / kRanksOfATurn;
}

void order_was_used_locked() { turn_order().ranked_at = turn_order().at; }

void read_in_order() {
  if (absent_cells.load(std::memory_order_relaxed) == 0) return;
  uint64_t ahead = 0;
  for (uint32_t places = 1;; ++places) {
    Cell* c;
    StoragePtr held;
    {
      std::lock_guard<std::mutex> lock(graph_lock());
      const TurnOrder& o = turn_order();
      if (!o.applies() || places >= o.count() || ahead >= mm_arena_budget(budget.arena) / kShareAhead) return;
      c = o.after(places);
      if (!c) continue;
      ahead += c->nbytes;
      if (c->resident() || c->reading || c->absence != Absence::kOffloaded || c->slot < 0) continue;
      held = hold(c);
    }
    if (!held) continue;
    const bool begun = begin_read(c) || (make_room_behind(c->nbytes, places) && begin_read(c));
    drop(std::move(held));
    if (!begun) return;
  }
}

}  // namespace memmgr::pager
