#include "residency/transfer.h"

#include <algorithm>
#include <cstring>

#include "base/budget.h"
#include "cells/deferred_drop.h"
#include "cells/stream_order.h"
#include "pools/pool.h"
#include "python/introspection.h"
#include "residency/reclaim.h"

namespace memmgr::pager {

namespace {

struct Read {
  Cell* cell;
  StoragePtr storage;  // so that the pointer to be shown lives
  at::DataPtr bytes;
};

// Guarded by the graph's lock.
struct Transfers {
  std::vector<Cell*> writes;
  std::vector<Read> reads;
  const mm_tier* polled = nullptr;  // all of them were looked at when it said `ended`
  uint64_t ended = 0;
  const mm_tier* seen_of = nullptr;  // the link was measured up to here
  mm_tier_stats seen{};
};

Transfers& transfers() {
  static auto* t = new Transfers;
  return *t;
}

std::atomic<int> under_way{0};
std::atomic<double> write_link{1e-9}, read_link{1e-9}, cpu_link{1e-10};

void forget_write_locked(Cell* c) {
  auto& writes = transfers().writes;
  writes.erase(std::remove(writes.begin(), writes.end(), c), writes.end());
  c->writing = -1;
  under_way--;
}

void end_write_locked(Cell* c, int result, Trash* trash) {
  const mm_slot slot = c->writing;
  forget_write_locked(c);
  if (result < 0) {
    note_tier_error(-result);
    trash->slots.push_back(slot);
    return;
  }
  c->slot = slot;
  note_moved_locked(c, true);
}

// The bytes are there; or the read has failed, or brought other bytes than left: then the cell is as absent as it was,
// and whoever touches it reads again and is told why.
void end_read(Read r, int result, uint64_t waited_ns = 0) {
  if (result < 0) note_tier_error(-result);
  const mm_stream filled_on = r.cell->pool->home(r.bytes.get());
  const bool good = result >= 0 && sum_agrees(r.cell, r.bytes.get());
  bool last;
  {
    Trash trash;
    std::lock_guard<std::mutex> lock(graph_lock());
    resident_cell_bytes -= r.cell->nbytes;
    mm_arena_note_virtual(r.cell->pool->arena, static_cast<int64_t>(r.cell->nbytes));
    if (good) note_moved_locked(r.cell, false);
    if (good || waited_ns)
      note_event(good ? Event::kReload : Event::kStall, r.cell->version ? r.cell->version->recipe : nullptr,
                 good ? r.cell->nbytes : 0, waited_ns);
    last = good ? come_back_locked(r.cell, std::move(r.bytes), filled_on, &trash) : end_move_locked(r.cell, true);
  }
  if (last) last_user_is_gone(r.cell);
  drop_later(std::move(r.storage));
}

}  // namespace

Link link() {
  return {write_link.load(std::memory_order_relaxed), read_link.load(std::memory_order_relaxed),
          cpu_link.load(std::memory_order_relaxed)};
}

void set_link(double seconds_per_byte) {
  write_link.store(seconds_per_byte);
  read_link.store(seconds_per_byte);
}

void set_link_cpu(double seconds_per_byte) { cpu_link.store(seconds_per_byte); }

static void note_link(std::atomic<double>& figure, uint64_t nbytes, uint64_t ns) {
  if (nbytes == 0) return;
  const double before = figure.load(std::memory_order_relaxed);
  const double now = static_cast<double>(ns) * 1e-9 / static_cast<double>(nbytes);
  // One that met the other direction's burst, or a thread that did not run, says little of the next.
  const double likely = std::clamp(now, before / 4, before * 4);
  figure.store(before + (likely - before) / 32, std::memory_order_relaxed);
}

// By the tier's own clock, so that copies for which nobody waits count as others do.
static void note_link_locked() {
  Transfers& t = transfers();
  mm_tier_stats now{};
  mm_tier_stats_get(budget.tier, &now);
  const mm_tier_stats seen = std::exchange(t.seen, now);
  if (std::exchange(t.seen_of, budget.tier) != budget.tier || now.written_bytes < seen.written_bytes ||
      now.read_bytes < seen.read_bytes)
    return;  // another tier
  const uint64_t written = now.written_bytes - seen.written_bytes, read = now.read_bytes - seen.read_bytes;
  note_link(write_link, written, now.write_nanoseconds - seen.write_nanoseconds);
  note_link(read_link, read, now.read_nanoseconds - seen.read_nanoseconds);
  note_link(cpu_link, written + read, now.cpu_nanoseconds - seen.cpu_nanoseconds);
}

void note_moved_locked(Cell* c, bool write) {
  note_link_locked();
  (write ? counters.offloads : counters.reloads)++;
  (write ? counters.offload_bytes : counters.reload_bytes) += c->nbytes;
  c->moved_bytes += c->nbytes;
}

void note_tier_error(int error) {
  counters.tier_errors++;
  std::lock_guard<std::mutex> lock(budget.error_lock);
  budget.tier_error = std::strerror(error);
}

bool transfers_under_way() { return under_way.load(std::memory_order_relaxed) > 0; }

size_t writes_under_way_locked() { return transfers().writes.size(); }

bool begin_write_locked(Cell* c) {
  if (!budget.tier_writes || c->small || c->slot >= 0 || c->writing >= 0 || nothing_leaves_locked() || !begin_move(c))
    return false;
  note_last_use(c);
  const mm_slot slot = mm_tier_write(budget.tier, c->bytes.get(), c->nbytes);
  counters.writes_ahead++;  // one that the tier refuses at once, too
  if (slot >= 0) {
    c->writing = slot;
    transfers().writes.push_back(c);
    under_way++;
  }  // else whoever has to leave is told
  return end_move_locked(c, false);
}

void cancel_write_locked(Cell* c, Trash* trash) {
  if (c->writing < 0) return;
  trash->slots.push_back(c->writing);
  forget_write_locked(c);
}

void await_write(Cell* c, std::unique_lock<std::mutex>* lock) {
  const mm_slot slot = c->writing;
  if (slot < 0) return;
  lock->unlock();
  // On a device the copy is queued, and whoever gets the memory comes behind it.
  const int result = c->pool->on_host() ? mm_tier_wait(budget.tier, slot) : 1;
  Trash trash;
  lock->lock();
  if (c->writing == slot) end_write_locked(c, result, &trash);
  if (trash.slots.empty()) return;
  lock->unlock();
  trash.end();
  lock->lock();
}

bool begin_read(Cell* c) {
  Read r{c, {}, {}};
  {
    std::lock_guard<std::mutex> lock(graph_lock());
    if (nothing_leaves_locked() || !budget.options.prefetch)
      return false;  // an op that nobody has seen relies on the trap
    uint32_t expected = kAbsent;
    if (!budget.tier || c->absence != Absence::kOffloaded || c->slot < 0) return true;  // nothing to read
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
  if (!r.bytes.get() || mm_tier_read(budget.tier, c->slot, r.bytes.get()) < 0) {
    end_move(c, true);
    drop_later(std::move(r.storage));
    return false;
  }
  std::lock_guard<std::mutex> lock(graph_lock());
  transfers().reads.push_back(std::move(r));
  c->reading = true;
  under_way++;
  resident_cell_bytes += c->nbytes;
  mm_arena_note_virtual(c->pool->arena, -static_cast<int64_t>(c->nbytes));
  counters.reads_ahead++;
  residency_changed().notify_all();  // who waits for it may help
  return true;
}

// Its bytes are there, for this thread or for what is queued behind the block's home.
static int wait_for_read(const Read& r) {
  if (r.cell->pool->on_host()) return mm_tier_wait(budget.tier, r.cell->slot);
  if (!rule_holds(kRulePrefetched)) return 0;
  return mm_tier_use(budget.tier, r.cell->slot, r.cell->pool->home(r.bytes.get()));
}

bool finish_read(Cell* c) {
  std::optional<Read> mine;
  {
    std::lock_guard<std::mutex> lock(graph_lock());
    auto& reads = transfers().reads;
    for (size_t i = 0; i < reads.size(); ++i) {
      if (reads[i].cell != c) continue;
      mine.emplace(std::move(reads[i]));
      reads.erase(reads.begin() + static_cast<std::ptrdiff_t>(i));
      c->reading = false;
      under_way--;
      break;
    }
  }
  if (!mine) return false;
  Wait wait;
  const int result = wait_for_read(*mine);
  const uint64_t waited = wait.end();
  counters.stall_ns += waited;
  if (waited > 20000) counters.late_reads++;
  end_read(std::move(*mine), result, waited);
  return true;
}

void poll_transfers() {
  if (!transfers_under_way()) return;
  std::vector<std::pair<Read, int>> done;
  Trash trash;
  {
    std::lock_guard<std::mutex> lock(graph_lock());
    const uint64_t ended = mm_tier_ended(budget.tier);
    if (std::exchange(transfers().polled, budget.tier) == budget.tier && ended == transfers().ended) return;
    transfers().ended = ended;
    const std::vector<Cell*> writes = transfers().writes;
    for (Cell* c : writes)
      if (const int result = mm_tier_poll(budget.tier, c->writing)) end_write_locked(c, result, &trash);
    auto& reads = transfers().reads;
    for (size_t i = reads.size(); i-- > 0;) {
      const int result = mm_tier_poll(budget.tier, reads[i].cell->slot);
      if (result == 0) continue;
      reads[i].cell->reading = false;
      done.emplace_back(std::move(reads[i]), result);
      reads.erase(reads.begin() + static_cast<std::ptrdiff_t>(i));
      under_way--;
    }
  }
  for (auto& [read, result] : done) end_read(std::move(read), result);
}

bool finish_any_read() {
  for (;;) {
    Cell* c;  // compared only
    {
      std::lock_guard<std::mutex> lock(graph_lock());
      if (transfers().reads.empty()) return false;
      c = transfers().reads.back().cell;
    }
    if (finish_read(c)) return true;
  }
}

bool drop_clean_copies() {
  Trash trash;
  std::lock_guard<std::mutex> lock(graph_lock());
  for_each_cell_locked([&](Cell* c) {
    if (c->state.load() & (kBusy | kAbsent)) return;
    cancel_write_locked(c, &trash);
    if (has_file_copy(c)) return;
    if (c->slot >= 0) trash.slots.push_back(c->slot);
    c->slot = -1;
  });
  return !trash.slots.empty();
}

void finish_transfers() {
  for (;;) {
    Cell* c = nullptr;
    mm_slot writing = -1;
    {
      std::lock_guard<std::mutex> lock(graph_lock());
      if (!transfers().reads.empty())
        c = transfers().reads.back().cell;
      else if (!transfers().writes.empty())
        writing = transfers().writes.back()->writing;
      else
        return;
    }
    if (c)
      finish_read(c);
    else
      mm_tier_wait(budget.tier, writing);
    poll_transfers();
  }
}

}  // namespace memmgr::pager
