#include "residency/restore.h"

#include <c10/util/ScopeExit.h>

#include <cerrno>
#include <cstring>
#include <optional>

#include "base/clock.h"
#include "base/events.h"
#include "base/forked_child.h"
#include "base/gil.h"
#include "base/lock.h"
#include "base/session.h"
#include "base/wait.h"
#include "cells/births.h"
#include "cells/cell.h"
#include "cells/copies.h"
#include "cells/lifetime.h"
#include "cells/mapped_range.h"
#include "cells/stream_order.h"
#include "cells/version.h"
#include "pools/capturing.h"
#include "pools/pool.h"
#include "residency/checksums.h"
#include "residency/transfer.h"
#include "residency/victims.h"

namespace memmgr::pager {

at::DataPtr (*rematerializer)(Cell* c) = nullptr;

// Turns a cell whose copy cannot be read into an evicted one. False: no recipe can make it. The caller has the cell
// busy.
static bool make_instead(Cell* c) {
  Trash trash;
  const Hold lock(graph_lock());
  if (!may_be_dropped_locked(c) || c->version->recipe->checked) return false;  // its checksum was not taken
  set_evicted_locked(c->version, true, &trash);
  c->absence = Absence::kEvicted;
  trash.add_slot(c, std::exchange(c->slot, -1));
  return true;
}

bool begin_restore(Cell* c) {
  Hold lock(graph_lock());
  for (;;) {
    uint32_t state = c->state.load(std::memory_order_acquire);
    if (!(state & (kAbsent | kBusy))) return false;
    if (state & kBusy) {
      const bool reading = c->reading;
      lock.unlock();
      if (reading && finish_read(c)) {
        lock.lock();
        continue;
      }
      {
        WithoutGil released;
        lock.lock();
        residency_changed().wait(lock,
                                 [&]() REQUIRES(graph_lock()) { return !(c->state.load() & kBusy) || c->reading; });
        lock.unlock();
      }
      lock.lock();
      continue;
    }
    if (c->state.compare_exchange_strong(state, state | kBusy, std::memory_order_acq_rel)) return true;
  }
}

at::DataPtr copy_back(Cell* c, Absence* absence) {
  at::DataPtr bytes;
  {
    std::optional<FilledByTier> filled;
    if (*absence != Absence::kPacked) filled.emplace();
    bytes = allocate_for(c);
  }
  if (*absence == Absence::kPacked) {
    mm_bits_unpack(&c->bits, bytes.get(), c->nbytes);
    return bytes;
  }
  Session& session = c->pool->session;
  const int wrong = mm_tier_read_now(session.tier, c->slot, bytes.get());
  if (wrong >= 0) return bytes;
  if (has_file_copy(c)) throw_file_failed(c, -wrong);
  c->pool->throw_if_broken();
  session.note_tier_error(-wrong);
  TORCH_CHECK(make_instead(c), "memmgr: the ", session.tier_name(), " tier failed: reading ", c->nbytes,
              " bytes back: ", std::strerror(-wrong),
              forked_child ? " (a forked child: its parent has needed the room on the disk)" : "");
  *absence = Absence::kEvicted;
  bytes.clear();
  return rematerializer(c);
}

void restore_cell(Cell* c) {
  if (!begin_restore(c)) {
    use_here(c);
    return;
  }
  Absence absence = c->absence;
  Wait wait;
  at::DataPtr bytes;
  try {
    const OwnWork own;
    TORCH_CHECK(!c->given_up, "memmgr: these bytes were lost when an earlier budget could not bring them back");
    TORCH_CHECK(!is_capturing(*c->pool),
                "memmgr: a graph is captured that needs a tensor which has left the device; run what "
                "it captures once before the capture begins, or give the budget more room");
    if (absence == Absence::kEvicted) {
      try {
        bytes = rematerializer(c);
      } catch (const c10::OutOfMemoryError&) {
        if (c->slot < 0) throw;  // otherwise the copy in the tier is read, which needs room for the cell alone
      }
    }
    if (!bytes) bytes = copy_back(c, &absence);
    check_restored(c, bytes.get());
  } catch (...) {
    end_move(c, true);
    throw;
  }
  bool last;
  const uint64_t waited = wait.end();  // without the waits inside it, which rematerialize.cpp counts
  Counters& counters = c->pool->session.counters;
  (absence == Absence::kEvicted ? counters.remat_ns : counters.stall_ns) += waited;
  {
    Trash trash;
    const Hold lock(graph_lock());
    if (absence == Absence::kOffloaded) note_moved_locked(c, false);
    if (absence != Absence::kEvicted) note_event_of_locked(Event::kReload, c, c->nbytes, waited);
    last = become_resident_locked(c, std::move(bytes), c->pool->stream(), &trash);
  }
  if (last) last_user_is_gone(c);
}

void fetch(Cell* c) {
  pin(c, ticks());
  const auto unpinned = c10::make_scope_exit([c] { unpin(c); });
  restore_cell(c);
}

}  // namespace memmgr::pager
