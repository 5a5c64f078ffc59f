// Plans: what a period like one that was measured does with its cells, followed by position and identity.
//
// A plan decides, it never supplies bytes: where a period deviates, malloc's own order goes on, as exact as before.
#pragma once

#include <cstdint>
#include <vector>

#include "remat/rematerialize.h"

namespace memmgr::pager {

// kMake: it is made again. kDrop, kOffload: it may leave, and how. kRead, once for each: a run to come reads it before
// it may.
enum class Row : uint8_t { kMake, kDrop, kOffload, kRead };

struct PlanRow {
  uint32_t position;
  uint32_t ordinal;  // with kBefore: of the period before
  Row what;
};

struct FollowedPlan {
  std::vector<uint64_t> hashes;  // of the period that it is for
  // Sorted by position.
  std::vector<PlanRow> departures;  // may go after it
  std::vector<PlanRow> writes;      // begin after it
  std::vector<PlanRow> reads;       // begin before it
  std::vector<PlanRow> groups;      // are made again before it, together, and leave between
  std::vector<KeptRow> kept;
  uint64_t after = 0;  // the period that came before it when it was met last
};

void add_plan(FollowedPlan plan);
void drop_plans();
// A plan leads in this period, as far as it has come.
bool plan_leads();
// And the period before was the plan's, too: it knows the cells that live on.
bool plan_foretells();

// What is due. Called by Moment.
void follow_before(uint32_t position);
void follow_position_locked(uint32_t position, uint64_t hash, uint64_t before);
void follow_after(uint32_t position);
// What the plan lets go, as far as it is needed: from inside malloc, or for a read `ahead`, which waits for no write.
// `request`: the block that is asked for, `want` of whose bytes are short; who leaves a place of that length goes
// first. Returns the bytes released.
uint64_t let_planned_go(uint64_t want, uint64_t request, bool ahead = false);
// Malloc had to choose for itself.
void note_short();

// Where a period left the plan that it had followed so far. `plan`: the last of the plan's hashes; 0: it left none.
struct LeftPlan {
  uint64_t plan = 0;
  size_t position = 0;
};

struct Followed {
  bool to_the_end = false;
  bool ran_short = false;
  uint64_t hash = 0;
  LeftPlan left;
};
// The period ends here, with so many ops and passes; the one `before` it had that hash. 0: none.
Followed end_following(uint64_t hash = 0, uint64_t before = 0, size_t ops = 0, uint64_t passes = 1);

}  // namespace memmgr::pager
