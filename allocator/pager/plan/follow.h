// Plans: their actions for the cells of a period like one that was measured. A plan is followed by position and
// identity.
//
// A plan decides, and never supplies bytes: in a period that deviates malloc's own order goes on, as exact as before.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/constants.h"
#include "base/session.h"
#include "remat/rematerialize.h"

namespace memmgr::pager {

struct PlanRow {
  uint32_t position;
  uint32_t ordinal;  // with kBefore: an ordinal of the period before
  Row what;
};

struct FollowedPlan {
  std::vector<uint64_t> hashes;  // of the period that the plan is for
  // Sorted by position.
  std::vector<PlanRow> departures;  // the cell may be evicted after the op
  std::vector<PlanRow> writes;      // begin after the op
  std::vector<PlanRow> reads;       // begin before the op
  std::vector<PlanRow> groups;      // rematerialized together before the op, and evicted within the group
  std::vector<KeptRow> kept;
  uint64_t after = 0;                 // the hash of the period that preceded it the last time
  std::shared_ptr<mm_places> places;  // of the period's blocks; null where moving pages costs next to nothing
};

void add_plan(const Session& session, FollowedPlan plan);
void drop_plans(const Session& session);
// A plan leads in this period, as far as it has come.
bool plan_leads();
// A plan leads, and the period before was the same plan's: the order of the cells that live on is known.
bool plan_foretells();

// Do the actions that are due. Called by Moment.
void follow_before(const Session& session, uint32_t position);
void follow_position_locked(const Session& session, uint32_t position, uint64_t hash, uint64_t before)
    REQUIRES(graph_lock());
void follow_after(const Session& session, uint32_t position);
// Evicts cells that the plan has released, until `want` bytes are free: inside malloc, or for a read `ahead`, which
// waits for no write. `request`: the bytes of the block that malloc needs; a cell of that size is evicted first.
// Returns the bytes released.
uint64_t evict_planned(const Session& session, uint64_t want, uint64_t request, bool ahead = false);
// Malloc had to choose a victim without the plan.
void note_short();

// The point at which a period left the plan that it had followed. `plan`: the last of the plan's hashes; 0: it left
// none.
struct LeftPlan {
  uint64_t plan = 0;
  size_t position = 0;
};

struct Followed {
  bool to_the_end = false;
  bool ran_short = false;
  uint64_t lacked_bytes = 0;  // missing for the blocks' places
  uint64_t hash = 0;
  LeftPlan left;
};
// Ends the following of a period. `hash`: of the period that ends; `before`: of the one before it. 0: none.
Followed end_following(Session& session, uint64_t hash = 0, uint64_t before = 0, size_t ops = 0, uint64_t passes = 1);

}  // namespace memmgr::pager
