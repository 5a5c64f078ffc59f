#include "residency/transfer.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "base/deferred_drop.h"
#include "base/events.h"
#include "base/lock.h"
#include "base/no_destructor.h"
#include "base/session.h"
#include "base/tensors.h"
#include "base/wait.h"
#include "cells/births.h"
#include "cells/cell.h"
#include "cells/copies.h"
#include "cells/freeze.h"
#include "cells/lifetime.h"
#include "cells/stream_order.h"
#include "cells/version.h"
#include "pools/pool.h"
#include "pools/stream_rules.h"
#include "residency/checksums.h"

namespace memmgr::pager {

namespace {

struct Read {
  Cell* cell;
  StoragePtr storage;  // keeps the pointer alive that is shown later
  at::DataPtr bytes;
};

struct Transfers {
  std::vector<Read> reads;
  const mm_tier* polled = nullptr;  // the tier whose copies were polled last, when it had counted `ended`
  uint64_t ended = 0;
};

NoDestructor<Transfers> transfers OF_GRAPH;

void end_write_locked(Cell* c, int result, Trash* trash) REQUIRES(graph_lock()) {
  const mm_slot slot = c->writing;
  forget_write_locked(c);
  if (result < 0) {
    c->pool->session.note_tier_error(-result);
    trash->add_slot(c, slot);
    return;
  }
  c->slot = slot;
  note_moved_locked(c, true);
}

// False: the bytes do not match their checksum, or the device fails while it is taken.
bool is_right(const Read& r) {
  try {
    return restored_sum_agrees(r.cell, r.bytes.get());
  } catch (const c10::Error&) {
    return false;
  }
}

// Ends a read and makes the cell resident. If the read failed, or the bytes are not known to be right, the
// cell stays absent: the next touch reads again and raises the error.
void end_read(Read r, int result, uint64_t waited_ns = 0) {
  if (result < 0) r.cell->pool->session.note_tier_error(-result);
  const mm_stream filled_on = r.cell->pool->home(r.bytes.get());
  const bool good = result >= 0 && is_right(r);
  bool last;
  {
    Trash trash;
    const Hold lock(graph_lock());
    totals.resident_cell_bytes -= r.cell->nbytes;
    mm_arena_note_virtual(r.cell->pool->arena, static_cast<int64_t>(r.cell->nbytes));
    if (good) note_moved_locked(r.cell, false);
    if (good || waited_ns)
      note_event_of_locked(good ? Event::kReload : Event::kStall, r.cell, good ? r.cell->nbytes : 0, waited_ns);
    last = good ? become_resident_locked(r.cell, std::move(r.bytes), filled_on, &trash) : end_move_locked(r.cell, true);
  }
  if (last) last_user_is_gone(r.cell);
  drop_later(std::move(r.storage));
}

}  // namespace

bool transfers_under_way() { return copies_under_way.load(std::memory_order_relaxed) > 0; }

bool begin_write_locked(Cell* c) {
  Session& session = c->pool->session;
  if (!session.tier_writes || c->small || c->slot >= 0 || c->writing >= 0 || is_frozen_locked() || !begin_move(c))
    return false;
  note_last_use(c);
  const mm_slot slot = mm_tier_write(session.tier, c->bytes.get(), c->nbytes);
  session.counters.writes_ahead++;  // counted even if the tier refuses it at once
  if (slot >= 0) {
    note_write_locked(c, slot);
  }  // a refused write is reported when the cell is evicted
  return end_move_locked(c, false);
}

void await_write(Cell* c) {
  const mm_slot slot = c->writing;
  if (slot < 0) return;
  int result = 1;  // on a device the copy is queued, and the next user of the memory is queued after it
  if (c->pool->on_host()) {
    const Unlocked free(graph_lock());
    result = mm_tier_wait(c->pool->session.tier, slot);
  }
  Trash trash;
  if (c->writing == slot) end_write_locked(c, result, &trash);
  if (trash.slots.empty()) return;
  const Unlocked free(graph_lock());
  trash.end();
}

bool begin_read(Cell* c) {
  Session& session = c->pool->session;
  Read r{c, {}, {}};
  {
    const Hold lock(graph_lock());
    if (is_frozen_locked() || !session.options.prefetch) return false;  // an op that is not seen relies on the trap
    uint32_t expected = kAbsent;
    if (!session.tier || c->absence != Absence::kOffloaded || c->slot < 0) return true;  // nothing to read
    if (!c->state.compare_exchange_strong(expected, kAbsent | kBusy, std::memory_order_acq_rel)) return true;
    r.storage = hold(c);
    if (!r.storage && !end_move_locked(c, true)) return true;
  }
  if (!r.storage) {
    last_user_is_gone(c);
    return true;
  }
  {
    const OwnWork own;
    const FilledByTier filled;
    r.bytes = try_allocate_for(c, 0);
  }
  if (!r.bytes.get() || mm_tier_read(session.tier, c->slot, r.bytes.get()) < 0) {
    end_move(c, true);
    drop_later(std::move(r.storage));
    return false;
  }
  const Hold lock(graph_lock());
  transfers->reads.push_back(std::move(r));
  c->reading = true;
  copies_under_way++;
  totals.resident_cell_bytes += c->nbytes;
  mm_arena_note_virtual(c->pool->arena, -static_cast<int64_t>(c->nbytes));
  session.counters.reads_ahead++;
  residency_changed().notify_all();  // a thread that waits for the cell may help
  return true;
}

// Waits for the bytes of a read: this thread does, or the stream that the block belongs to.
static int wait_for_read(const Read& r) {
  mm_tier* tier = r.cell->pool->session.tier;
  if (r.cell->pool->on_host()) return mm_tier_wait(tier, r.cell->slot);
  if (!rule_holds(kRulePrefetched)) return 0;
  return mm_tier_use(tier, r.cell->slot, r.cell->pool->home(r.bytes.get()));
}

bool finish_read(Cell* c) {
  std::optional<Read> mine;
  {
    const Hold lock(graph_lock());
    auto& reads = transfers->reads;
    for (size_t i = 0; i < reads.size(); ++i) {
      if (reads[i].cell != c) continue;
      mine.emplace(std::move(reads[i]));
      reads.erase(reads.begin() + static_cast<std::ptrdiff_t>(i));
      c->reading = false;
      copies_under_way--;
      break;
    }
  }
  if (!mine) return false;
  Session& session = c->pool->session;
  Wait wait;
  const int result = wait_for_read(*mine);
  const uint64_t waited = wait.end();
  session.counters.stall_ns += waited;
  if (waited > 20000) session.counters.late_reads++;
  end_read(std::move(*mine), result, waited);
  return true;
}

void poll_transfers(const Session& session) {
  if (!transfers_under_way()) return;
  std::vector<std::pair<Read, int>> done;
  Trash trash;
  {
    const Hold lock(graph_lock());
    const uint64_t ended = mm_tier_ended(session.tier);
    if (std::exchange(transfers->polled, session.tier) == session.tier && ended == transfers->ended) return;
    transfers->ended = ended;
    const std::vector<Cell*> writes = writes_under_way();
    for (Cell* c : writes)
      if (const int result = mm_tier_known(session.tier, c->writing)) end_write_locked(c, result, &trash);
    std::vector<Read> still;
    for (Read& read : transfers->reads) {
      const int result = mm_tier_known(session.tier, read.cell->slot);
      if (result == 0) {
        still.push_back(std::move(read));
        continue;
      }
      read.cell->reading = false;
      done.emplace_back(std::move(read), result);
      copies_under_way--;
    }
    transfers->reads = std::move(still);
  }
  for (auto& [read, result] : done) end_read(std::move(read), result);
}

bool finish_any_read() {
  for (;;) {
    Cell* c;  // only compared
    {
      const Hold lock(graph_lock());
      if (transfers->reads.empty()) return false;
      c = transfers->reads.back().cell;
    }
    if (finish_read(c)) return true;
  }
}

bool drop_clean_copies() {
  Trash trash;
  const Hold lock(graph_lock());
  for_each_cell_locked([&](Cell* c) REQUIRES(graph_lock()) {
    if (c->state.load() & (kBusy | kAbsent)) return;
    cancel_write_locked(c, &trash);
    if (has_file_copy(c)) return;
    if (c->slot >= 0) trash.add_slot(c, c->slot);
    c->slot = -1;
  });
  return !trash.slots.empty();
}

void finish_transfers(const Session& session) {
  for (;;) {
    Cell* c = nullptr;
    mm_slot writing = -1;
    {
      const Hold lock(graph_lock());
      if (!transfers->reads.empty())
        c = transfers->reads.back().cell;
      else if (!writes_under_way().empty())
        writing = writes_under_way().back()->writing;
      else
        return;
    }
    if (c)
      finish_read(c);
    else
      mm_tier_wait(session.tier, writing);
    poll_transfers(session);
  }
}

}  // namespace memmgr::pager
