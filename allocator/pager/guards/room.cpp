#include "guards/room.h"

#include <optional>

#include "base/tensors.h"
#include "base/thread_state.h"
#include "cells/adoption.h"
#include "cells/cell.h"
#include "cells/fixed_memory.h"
#include "cells/mapped_range.h"
#include "concurrency/admission.h"
#include "guards/mapped_files.h"
#include "pools/pool.h"
#include "pools/promised.h"
#include "residency/reclaim.h"

namespace memmgr::pager {

Cell* adopt_in_budget(Session& session, c10::StorageImpl* s, bool may_wait) {
  const uint64_t nbytes = s->nbytes();
  if (pointer_of(s).get_deleter() == session.pool->deleter() || nbytes < session.options.small_bytes)
    return adopt(session, s);
  Cell* made = nullptr;
  with_room(session, nbytes, may_wait, [&] { made = adopt(session, s); });
  return made;
}

Cell* adopt_if_room(Session& session, c10::StorageImpl* s, bool may_wait) {
  try {
    return adopt_in_budget(session, s, may_wait);
  } catch (const c10::OutOfMemoryError&) {
    if (!is_mapped(s)) throw;
  }
  share_mapping(s);
  return nullptr;
}

void with_room(Session& session, uint64_t nbytes, bool may_wait, c10::function_ref<void()> take) {
  const Depth depth;  // without it this thread would wait for itself: an op that runs alone is counted
  std::optional<Admitted> alone;
  SeenNewborns newborns;
  for (int pauses = 0;;) {
    newborns.look();
    {
      const Promised promised(session.arena, nbytes);  // otherwise another thread would take the room
      bool may_leave = true;
      for (int i = 0; may_leave; ++i) {
        const uint64_t shortage = mm_arena_shortage(session.arena);
        if (shortage == 0) return take();
        may_leave = reclaim_callback(session.pool, shortage, nbytes, i);
      }
    }
    if (!may_wait || (alone && (++pauses > kMostPauses || !newborns.may_free_room())))
      throw_out_of_memory(*session.pool, nbytes);
    alone.reset();
    if (pauses > 0) wait_for_others(kPauseSeconds);
    alone.emplace(session, nbytes, true);
  }
}

void count_fixed_in_budget(Session& session, c10::StorageImpl* s, bool may_wait) {
  const std::optional<Owner> owner = owner_of_fixed(session, s);
  if (!owner) return;
  look_for_ended_fixed();
  if (takes_room(*owner))
    with_room(session, s->nbytes(), may_wait, [&] { count_fixed(session, s, *owner); });
  else
    count_fixed(session, s, *owner);
}

}  // namespace memmgr::pager
