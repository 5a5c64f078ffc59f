#include "plan/follow.h"

#include <algorithm>
#include <deque>
#include <list>
#include <utility>

#include "base/clock.h"
#include "base/deferred_drop.h"
#include "base/lock.h"
#include "base/no_destructor.h"
#include "base/tensors.h"
#include "cells/cell.h"
#include "cells/freeze.h"
#include "cells/lifetime.h"
#include "cells/types.h"
#include "plan/timeline.h"
#include "pools/stream_rules.h"
#include "residency/evict.h"
#include "residency/reclaim.h"
#include "residency/restore.h"
#include "residency/transfer.h"
#include "residency/victims.h"

namespace memmgr::pager {

namespace {

constexpr size_t kMostPlans = 16;
constexpr uint64_t kAll = ~uint64_t{0};
constexpr size_t kMostLooks = 256;  // departures looked at under the graph's lock, for one request

struct Departure {
  uint32_t ordinal;
  uint32_t turn;  // the count of the cell's returns when it departed
  Way way;
};

// A cell that departs in a group, as soon as the group's recipes that read it have run.
struct Unread {
  uint32_t ordinal, uses = 0;
  bool departs = false;
  Row how = Row::kDrop;
};

struct Follower {
  std::list<FollowedPlan> plans;  // the latest first
  const FollowedPlan* leads = nullptr;
  bool decided = false;                                      // True once a plan leads, or none fits.
  size_t departures = 0, writes = 0, reads = 0, groups = 0;  // the next action of each kind
  std::deque<Departure> going;
  // Departures that are done. A cell that a rematerialization restored before its time departs again.
  std::vector<Departure> gone;
  // By ordinal, of this period and of the one before: how often the plan has made the cell resident. A departure with a
  // smaller number is void.
  std::vector<uint32_t> turns;
  std::vector<uint32_t> deferred;     // reads that found no room
  std::vector<Unread> unread;         // of the group that runs
  std::shared_ptr<mm_places> places;  // that the arena follows
  bool ran_short = false;
  LeftPlan left;
};

NoDestructor<Follower> follower OF_GRAPH;

std::atomic<bool> leading{false}, foretelling{false};

size_t at_or_after(const std::vector<PlanRow>& rows, uint32_t position) {
  return static_cast<size_t>(std::lower_bound(rows.begin(), rows.end(), position,
                                              [](const PlanRow& row, uint32_t p) { return row.position < p; }) -
                             rows.begin());
}

void lead_locked(Follower& f, const FollowedPlan* plan, uint32_t position) REQUIRES(graph_lock()) {
  f.leads = plan;
  leading = plan != nullptr;
  foretelling = false;
  if (!plan) {
    f.going.clear();
    f.gone.clear();
    f.deferred.clear();
    f.unread.clear();
    return;
  }
  f.departures = at_or_after(plan->departures, position);
  f.writes = at_or_after(plan->writes, position);
  f.reads = at_or_after(plan->reads, position);
  f.groups = at_or_after(plan->groups, position);
}

// A period begins with these places, or goes on without any.
void follow_places_locked(mm_arena* arena, Follower& f, std::shared_ptr<mm_places> places) REQUIRES(graph_lock()) {
  if (!places && !f.places) return;
  if (arena) mm_arena_follow(arena, places.get());
  f.places = std::move(places);
}

uint32_t& turn_of(Follower& f, uint32_t ordinal) {
  const size_t at = 2 * static_cast<size_t>(ordinal & ~kBefore) + (ordinal & kBefore ? 1 : 0);
  if (at >= f.turns.size()) f.turns.resize(at + 1);
  return f.turns[at];
}

// Returns null if the cell has ended or is not the one that the plan means.
Cell* cell_locked(const Follower& f, uint32_t ordinal) REQUIRES(graph_lock()) {
  if (!(ordinal & kBefore)) return cell_of_ordinal_locked(ordinal);
  return f.leads ? cell_before_locked(ordinal & ~kBefore, f.leads->hashes.back()) : nullptr;
}

void depart_locked(Follower& f, uint32_t ordinal, Row how) REQUIRES(graph_lock()) {
  f.going.push_back({ordinal, turn_of(f, ordinal), how == Row::kOffload ? Way::kOffload : Way::kEvict});
}

Unread* unread_locked(Follower& f, uint32_t ordinal) REQUIRES(graph_lock()) {
  const auto found =
      std::find_if(f.unread.begin(), f.unread.end(), [&](const Unread& u) { return u.ordinal == ordinal; });
  return found == f.unread.end() ? nullptr : &*found;
}

// Handles an action of a group that rematerializes nothing.
void depart_in_group_locked(Follower& f, const PlanRow& row) REQUIRES(graph_lock()) {
  Unread* unread = unread_locked(f, row.ordinal);
  if (row.what == Row::kUsed) {
    if (!unread) unread = &f.unread.emplace_back(Unread{row.ordinal});
    unread->uses++;
  } else if (unread && unread->uses > 0) {
    unread->departs = true;
    unread->how = row.what;
  } else {
    depart_locked(f, row.ordinal, row.what);
  }
}

// Called when no recipe of the group can run that would read the cells.
void end_group() {
  const Hold lock(graph_lock());
  Follower& f = *follower;
  for (const Unread& u : f.unread)
    if (u.departs) depart_locked(f, u.ordinal, u.how);
  f.unread.clear();
}

// Returns the first departure whose block has the request's size: no pages are moved, and no other cell is evicted for
// it. A cell without a copy does not count, as its eviction waits for a write. Without such a departure it is the first
// one.
std::deque<Departure>::iterator place_of_locked(const Options& options, Follower& f, uint64_t request)
    REQUIRES(graph_lock()) {
  const auto end = f.going.begin() + static_cast<std::ptrdiff_t>(std::min(f.going.size(), kMostLooks));
  if (request < options.small_bytes) return f.going.begin();
  const auto found = std::find_if(f.going.begin(), end, [&](const Departure& g) REQUIRES(graph_lock()) {
    const Cell* c = turn_of(f, g.ordinal) == g.turn ? cell_locked(f, g.ordinal) : nullptr;
    return c && rounded(c->nbytes) == rounded(request) && c->state.load(std::memory_order_relaxed) == 0 &&
           (g.way == Way::kEvict || c->slot >= 0);
  });
  return found != end ? found : f.going.begin();
}

// Moves cells that the plan has evicted and that are resident all the same to the pending departures. False: there is
// none.
bool go_again_locked(Follower& f) REQUIRES(graph_lock()) {
  std::vector<Departure> gone;
  for (const Departure& g : f.gone) {
    if (turn_of(f, g.ordinal) != g.turn) continue;
    const Cell* c = cell_locked(f, g.ordinal);
    if (!c) continue;
    if (c->resident())
      f.going.push_back(g);
    else
      gone.push_back(g);
  }
  f.gone.swap(gone);
  return !f.going.empty();
}

// Pages of long-lived blocks have holes that sites cannot use, so a plan with room for all bytes may lack room for all
// frames. Returns the bytes that were missing.
uint64_t lacked_bytes_locked(const Follower& f) REQUIRES(graph_lock()) {
  mm_places_stats s{};
  if (f.places) mm_places_stats_get(f.places.get(), &s);
  return s.lacking_periods > 1 ? s.lacking_bytes : 0;
}

// Evicts the cells that have departed. Blocks have places only where each of them ends when the plan says.
void evict_departed(const Session& session) {
  {
    const Hold lock(graph_lock());
    const Follower& f = *follower;
    if (!f.places || f.going.empty()) return;
  }
  evict_planned(session, kAll, 0);
}

// Begins the reads that are due. A read that finds no room is tried again after the next op.
void read_ahead(const Session& session, std::vector<uint32_t> due) {
  std::vector<uint32_t> later;
  for (const uint32_t ordinal : due) {
    Cell* c;
    StoragePtr held;
    {
      const Hold lock(graph_lock());
      c = cell_locked(*follower, ordinal);
      if (!c || c->resident() || !c->storage._unsafe_get_target()) continue;
      held = hold(c);
    }
    if (!held) continue;
    bool begun = begin_read(c);
    if (!begun && evict_planned(session, c->nbytes, c->nbytes, true)) begun = begin_read(c);
    if (!begun) later.push_back(ordinal);
    drop(std::move(held));
    if (!later.empty()) {  // keeps the order: the first read is needed first
      for (const uint32_t other : due)
        if (other != ordinal && std::find(due.begin(), due.end(), other) > std::find(due.begin(), due.end(), ordinal))
          later.push_back(other);
      break;
    }
  }
  if (later.empty()) return;
  const Hold lock(graph_lock());
  Follower& f = *follower;
  if (f.leads) f.deferred.insert(f.deferred.begin(), later.begin(), later.end());
}

// A recipe has run for others of its group. Cells that waited for it depart.
void has_been_read_locked(const Recipe* r) REQUIRES(graph_lock()) {
  Follower& f = *follower;
  if (f.unread.empty()) return;
  for (const TensorArg& a : r->tensors)
    for (Unread& u : f.unread) {
      if (!a.version || !a.version->cell || cell_locked(f, u.ordinal) != a.version->cell) continue;
      if (u.uses == 0 || --u.uses > 0 || !std::exchange(u.departs, false)) continue;
      depart_locked(f, u.ordinal, u.how);
    }
}

// Rematerializes a group together, before the op at this position: shared intermediates are made once.
void run_group(const Session& session, const std::vector<PlanRow>& rows, uint32_t position, std::vector<KeptRow> kept) {
  std::vector<uint32_t> ordinals;
  for (const PlanRow& row : rows)
    if (row.what == Row::kMake) ordinals.push_back(row.ordinal);
  const GroupPlan plan{&cell_of_ordinal_locked, &was_ordinal_locked, &has_been_read_locked};
  RematGroup group(plan, ordinals, position, std::move(kept));
  bool room = true;
  for (const PlanRow& row : rows) {
    Cell* c;
    StoragePtr held;
    {
      const Hold lock(graph_lock());
      Follower& f = *follower;
      if (!f.leads) return;  // the waiting cells were forgotten with the plan
      if (row.what != Row::kMake) {
        depart_in_group_locked(f, row);
        continue;
      }
      c = cell_of_ordinal_locked(row.ordinal);
      if (!room || !c || c->resident() || c->absence == Absence::kOffloaded) continue;
      held = hold(c);
    }
    if (!held) continue;
    pin(c, ticks());
    try {
      restore_cell(c);
    } catch (const std::exception&) {
      room = false;  // the op that needs the cell makes it with its own pins, and raises the error
    }
    unpin(c);
    drop(std::move(held));
    group.end_read();
    evict_departed(session);
  }
  end_group();
  evict_departed(session);
}

}  // namespace

static uint64_t evict_planned_in_malloc(const Session& session, uint64_t want, uint64_t request) {
  return evict_planned(session, want, request);
}
static const bool evicts_planned =
    (room_sources.planned = &evict_planned_in_malloc, room_sources.plan_is_short = &note_short, true);

void add_plan(const Session& session, FollowedPlan plan) {
  if (queues)
    plan.places = std::shared_ptr<mm_places>(mm_places_make(),
                                             [arena = session.arena](mm_places* p) { mm_places_end(arena, p); });
  const Hold lock(graph_lock());
  Follower& f = *follower;
  for (const FollowedPlan& p : f.plans)
    if (p.hashes == plan.hashes) plan.after = p.after;
  f.plans.remove_if([&](const FollowedPlan& p) { return p.hashes == plan.hashes && &p != f.leads; });
  f.plans.push_front(std::move(plan));
  if (f.plans.size() > kMostPlans && &f.plans.back() != f.leads) f.plans.pop_back();
}

void drop_plans(const Session& session) {
  const Hold lock(graph_lock());
  lead_locked(*follower, nullptr, 0);
  follow_places_locked(session.arena, *follower, nullptr);
  *follower = Follower();
}

bool plan_leads() { return leading.load(std::memory_order_relaxed); }
bool plan_foretells() { return foretelling.load(std::memory_order_relaxed); }

// Several plans may begin with the same ops, and the one that leads until they part acts for all. The plan that
// followed the period before last time is likely to follow it again.
void follow_position_locked(const Session& session, uint32_t position, uint64_t hash, uint64_t before) {
  Follower& f = *follower;
  if (f.plans.empty() || (f.decided && !f.leads)) return;
  const auto fits = [&](const FollowedPlan& p) { return position < p.hashes.size() && p.hashes[position] == hash; };
  if (f.leads && fits(*f.leads)) {
    if (f.places) mm_arena_at(session.arena, position);
    return;
  }
  auto found =
      std::find_if(f.plans.begin(), f.plans.end(), [&](const FollowedPlan& p) { return p.after == before && fits(p); });
  if (found == f.plans.end()) found = std::find_if(f.plans.begin(), f.plans.end(), fits);
  if (found == f.plans.end()) f.left = {f.leads ? f.leads->hashes.back() : f.plans.front().hashes.back(), position};
  f.decided = true;
  lead_locked(f, found == f.plans.end() ? nullptr : &*found, position);
  foretelling = f.leads && f.leads->hashes.back() == before;
  // A round that several plans begin alike is followed by the one that was right last time.
  follow_places_locked(session.arena, f, foretelling && position == 0 ? f.leads->places : nullptr);
}

void follow_before(const Session& session, uint32_t position) {
  if (!plan_leads()) return;
  std::vector<uint32_t> due, again;
  std::vector<PlanRow> group;
  std::vector<KeptRow> kept;
  {
    const Hold lock(graph_lock());
    Follower& f = *follower;
    if (!f.leads) return;
    const FollowedPlan& p = *f.leads;
    for (; f.reads < p.reads.size() && p.reads[f.reads].position <= position; ++f.reads) {
      turn_of(f, p.reads[f.reads].ordinal)++;
      due.push_back(p.reads[f.reads].ordinal);
    }
    for (; f.groups < p.groups.size() && p.groups[f.groups].position <= position; ++f.groups) {
      group.push_back(p.groups[f.groups]);
      if (group.back().what == Row::kMake) turn_of(f, group.back().ordinal)++;
    }
    if (!group.empty())
      for (const KeptRow& k : p.kept)
        if (k.made == position) kept.push_back(k);
    if (!due.empty() && !f.deferred.empty()) {
      due.insert(due.begin(), f.deferred.begin(), f.deferred.end());
      f.deferred.clear();
    }
  }
  if (!due.empty()) read_ahead(session, std::move(due));
  if (!group.empty()) run_group(session, group, position, std::move(kept));
}

void follow_after(const Session& session, uint32_t position) {
  if (!queues || position % 8 == 0) poll_transfers(session);  // on a device it asks the driver
  if (!plan_leads()) return;
  std::vector<uint32_t> deferred;
  std::vector<Cell*> ended;
  {
    const Hold lock(graph_lock());
    Follower& f = *follower;
    if (!f.leads) return;
    const FollowedPlan& p = *f.leads;
    for (; f.writes < p.writes.size() && p.writes[f.writes].position <= position; ++f.writes) {
      Cell* c = cell_locked(f, p.writes[f.writes].ordinal);
      if (c && c->resident() && begin_write_locked(c)) ended.push_back(c);
    }
    for (; f.departures < p.departures.size() && p.departures[f.departures].position <= position; ++f.departures) {
      const PlanRow& row = p.departures[f.departures];
      depart_locked(f, row.ordinal, row.what);
    }
    deferred.swap(f.deferred);
  }
  for (Cell* c : ended) last_user_is_gone(c);
  evict_departed(session);
  if (!deferred.empty()) read_ahead(session, std::move(deferred));
}

uint64_t evict_planned(const Session& session, uint64_t want, uint64_t request, bool ahead) {
  if (!plan_leads()) return 0;
  uint64_t released = 0;
  bool again = false;
  std::vector<Departure> pinned;  // and with `ahead`, cells without a copy
  while (released < want) {
    Cell* c = nullptr;
    Departure next{};
    {
      const Hold lock(graph_lock());
      Follower& f = *follower;
      if (f.going.empty() && (want == kAll || std::exchange(again, true) || !go_again_locked(f)))
        break;  // once: some stay resident
      const auto place = released == 0 ? place_of_locked(session.options, f, request) : f.going.begin();
      next = *place;
      f.going.erase(place);
      if (turn_of(f, next.ordinal) != next.turn) continue;
      c = cell_locked(f, next.ordinal);
      if (!c) continue;
      if (!c->resident()) {
        f.gone.push_back(next);
        continue;
      }
      if ((ahead && next.way == Way::kOffload && c->slot < 0) || !claim_locked(c)) {
        pinned.push_back(next);
        continue;
      }
    }
    released += evict_claimed(c, EvictedFor::kPlan, next.way);
    const Hold lock(graph_lock());
    follower->gone.push_back(next);
  }
  if (!pinned.empty()) {
    const Hold lock(graph_lock());
    follower->going.insert(follower->going.begin(), pinned.begin(), pinned.end());
  }
  return released;
}

void note_short() {
  if (!plan_leads()) return;
  const Hold lock(graph_lock());
  follower->ran_short = true;
}

Followed end_following(Session& session, uint64_t hash, uint64_t before, size_t ops, uint64_t passes) {
  Followed result;
  {
    const Hold lock(graph_lock());
    Follower& f = *follower;
    const auto met =
        std::find_if(f.plans.begin(), f.plans.end(), [&](const FollowedPlan& p) { return p.hashes.back() == hash; });
    if (met != f.plans.end()) {
      met->after = before;
      f.plans.splice(f.plans.begin(), f.plans, met);  // the latest first
    }
    result.hash = hash;
    result.to_the_end = f.leads && f.leads->hashes.back() == hash;
    result.lacked_bytes = lacked_bytes_locked(f);
    result.ran_short = f.ran_short || result.lacked_bytes > 0;
    result.left = std::exchange(f.left, LeftPlan());
    if (hash && f.leads && !result.to_the_end) result.left = {f.leads->hashes.back(), ops};
    lead_locked(f, nullptr, 0);
    if (!result.to_the_end) follow_places_locked(session.arena, f, nullptr);
    f.decided = false;
    f.ran_short = false;
    f.turns.clear();
  }
  end_kept_ghosts();
  if (result.to_the_end) {
    session.counters.planned_periods += passes;
    if (result.ran_short) session.counters.short_periods++;
  } else if (result.left.plan) {
    session.counters.left_periods += passes;
  }
  return result;
}

}  // namespace memmgr::pager
