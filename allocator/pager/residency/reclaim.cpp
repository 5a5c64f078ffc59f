#include "residency/reclaim.h"

#include <Python.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <thread>

#include "base/budget.h"
#include "cells/deferred_drop.h"
#include "cells/names.h"
#include "cells/stream_order.h"
#include "concurrency/admission.h"
#include "concurrency/python_threads.h"
#include "dispatch/op_need.h"
#include "guards/captures.h"
#include "guards/collective_pins.h"
#include "guards/fixed_memory.h"
#include "guards/unseen_threads.h"
#include "plan/follow.h"
#include "plan/loops.h"
#include "pools/pool.h"
#include "python/introspection.h"
#include "recipes/recipe.h"
#include "remat/rematerialize.h"
#include "residency/transfer.h"
#include "residency/victims.h"

namespace memmgr::pager {

Budget budget;
Counters counters;

WithoutGil::WithoutGil() {
  if (Py_IsInitialized() && PyGILState_Check()) saved_ = PyEval_SaveThread();
}
WithoutGil::~WithoutGil() {
  if (saved_) PyEval_RestoreThread(static_cast<PyThreadState*>(saved_));
}

// ---- time ----

static thread_local uint64_t tl_waited_ns = 0;

const uint64_t& waited_ns() { return tl_waited_ns; }
Wait::Wait() : begun_(now_ns()), before_(tl_waited_ns) {}
uint64_t Wait::end() {
  const uint64_t all = now_ns() - begun_, inner = tl_waited_ns - before_;
  tl_waited_ns = before_ + all;
  return all - std::min(all, inner);
}

// ---- nothing leaves ----

static std::atomic<int> frozen{0};
static thread_local bool tl_froze = false;

void nothing_leaves(bool begin) {
  tl_froze = begin;
  hold_departures(begin);
}

void hold_departures(bool begin) {
  std::lock_guard<std::mutex> lock(graph_lock());  // whoever claims a victim has seen it
  frozen.fetch_add(begin ? 1 : -1);
}

void stay_in_child() {
  frozen.fetch_add(1);
  budget.options.torture = false;
}

bool nothing_leaves_locked() { return frozen.load() > 0; }

static thread_local int tl_nothing_is_dropped = 0;
NothingIsDropped::NothingIsDropped() { ++tl_nothing_is_dropped; }
NothingIsDropped::~NothingIsDropped() { --tl_nothing_is_dropped; }

// ---- leaving ----

namespace {

// In torture what left stays a while, with other bytes in it: it comes back elsewhere, and who still reads it is found.
struct Buried {
  std::mutex lock;
  std::deque<std::pair<at::DataPtr, uint64_t>> all;
  uint64_t total = 0;
};

Buried& buried() {
  static auto* b = new Buried;
  return *b;
}

void shorten(uint64_t room, size_t most) {
  std::vector<at::DataPtr> end;
  Buried& b = buried();
  std::lock_guard<std::mutex> lock(b.lock);
  while (!b.all.empty() && (b.total > room || b.all.size() > most)) {
    end.push_back(std::move(b.all.front().first));
    b.total -= b.all.front().second;
    b.all.pop_front();
  }
}

void bury(Pool* pool, at::DataPtr bytes, uint64_t nbytes) {
  pool->scribble(bytes.get(), nbytes);
  Buried& b = buried();
  {
    std::lock_guard<std::mutex> lock(b.lock);
    b.all.emplace_back(std::move(bytes), nbytes);
    b.total += nbytes;
  }
  shorten(std::min<uint64_t>(1 << 20, mm_arena_budget(budget.arena) / 32), 16);
}

// The first cell that leaves in a budget and every 64th after it, if a sum of it costs little.
bool in_the_sample(const Pool* pool, uint64_t nbytes) {
  if (!budget.options.sample || !rule_holds(kSampled)) return false;
  return counters.departures++ % budget.options.sample == 0 && pool->sums_cheaply(nbytes);
}

// The caller has set kBusy, and says how the reference is given back. Returns the bytes released.
uint64_t leave(Cell* c, Way way, void (*let_go_of)(StoragePtr)) {
  if (tl_nothing_is_dropped > 0) way = Way::kOffload;
  StoragePtr storage;
  at::DataPtr bytes;
  Trash cancelled;
  bool last = false;
  uint64_t released = 0;
  const uint64_t nbytes = c->nbytes;
  Pool* const pool = c->pool;
  const auto end_bytes = [&] {
    if (budget.options.torture && bytes.get() && bytes.get_deleter() == pool->deleter())
      bury(pool, std::move(bytes), nbytes);
    bytes.clear();
  };
  {
    std::unique_lock<std::mutex> lock(graph_lock());
    const auto give_up = [&] {
      last = end_move_locked(c, false);
      lock.unlock();
      if (last) last_user_is_gone(c);
      if (storage) let_go_of(std::move(storage));
      return uint64_t{0};
    };
    const bool orphan = !c->storage._unsafe_get_target();
    if (!orphan) {
      storage = hold(c);
      if (!storage || cell_of(storage.get()) != c) return give_up();
    }
    bool drop;
    const double cost = cost_of_leaving_locked(c, &drop);
    if (cost < 0) return give_up();
    if (way != Way::kCheaper && may_be_dropped_locked(c))
      drop = way == Way::kEvict || !(c->slot >= 0 || may_be_offloaded());
    // In torture every other time, so that the recipe has its turn, too.
    static std::atomic<int> turn{0};
    const bool pack = may_be_packed_locked(c) && !(budget.options.torture && turn++ % 2);
    uint64_t packed = 0;
    mm_bits bits{};
    if (pack) {
      const void* from = c->bytes.get();
      Kind* const kind = c->version->recipe->kind;
      lock.unlock();
      packed = mm_bits_pack(from, c->nbytes, &bits);
      lock.lock();
      if (packed && !budget.options.torture && (c->state.load() & kPinMask)) {
        mm_bits_free(&bits);
        return give_up();
      }
      // The first of its kind may have been two-valued by chance (zeros, say): no plan counts on it again.
      if (packed)
        drop = false;
      else
        kind->bits_bytes = 0;
    }
    // Before the bytes are written: a device would else wait for that copy before it goes on.
    Checksum sum;
    const auto take_sum = [&] {
      const void* from = c->bytes.get();
      lock.unlock();
      sum = pool->begin_sum(from, nbytes);
      lock.lock();
    };
    if (budget.options.verify || in_the_sample(pool, nbytes)) take_sum();
    if (!packed && drop && !may_be_dropped_locked(c)) drop = false;  // its recipe has ended meanwhile
    if (!packed && !drop && c->slot < 0 && !may_be_offloaded()) {    // it has more values than others of its kind
      if (!may_be_dropped_locked(c)) return give_up();
      drop = true;
    }
    if (!drop && !packed) await_write(c, &lock);
    if (!drop && !packed && c->slot < 0) {
      const void* from = c->bytes.get();
      lock.unlock();
      note_last_use(c);
      mm_slot slot = mm_tier_write_now(budget.tier, from, c->nbytes);
      if (slot == -ENOSPC && drop_clean_copies()) {
        note_last_use(c);
        slot = mm_tier_write_now(budget.tier, from, c->nbytes);
      }
      lock.lock();
      if (slot >= 0) {
        c->slot = slot;
        note_moved_locked(c, true);
      } else {
        note_tier_error(static_cast<int>(-slot));
        if (!may_be_dropped_locked(c)) return give_up();
        drop = true;
      }
      // Somebody came for it meanwhile: it stays, clean.
      if (!budget.options.torture && (c->state.load() & kPinMask)) return give_up();
    } else if (!drop && !packed) {
      counters.clean_drops++;
    }
    if (drop && c->version->recipe->checked && !sum.taken()) {
      take_sum();
      if (!sum.taken() || !may_be_dropped_locked(c)) return give_up();
    }
    c->checksum = std::move(sum);
    Trash trash;
    if (packed) {
      counters.packed++;
      c->absence = Absence::kPacked;
      c->bits = bits;
    } else if (drop) {
      counters.evictions++;
      counters.evicted_bytes += c->nbytes;
      c->absence = Absence::kEvicted;
      set_evicted_locked(c->version, true, &trash);
    } else {
      c->absence = Absence::kOffloaded;
    }
    if (drop) cancel_write_locked(c, &cancelled);
    note_event(drop ? Event::kEvict : Event::kOffload, c->version ? c->version->recipe : nullptr, c->nbytes, 0);
    const bool pages = in_mapping(c);
    if (pages) note_sample_locked(c);
    bytes = go_away_locked(c, storage.get());
    if (pages) {
      lock.unlock();
      drop_pages(*c->range);
      lock.lock();
    }
    if (packed) {  // counted once there is room for them; the cell is busy until then
      c->state.fetch_or(kAbsent);
      const Promised promised(pool->arena, packed);
      lock.unlock();
      end_bytes();
      lock.lock();
      count_bits_locked(c, packed);
    }
    released = nbytes - packed;
    last = end_move_locked(c, true);
    lock.unlock();
  }
  cancelled.end();  // what was being written reads the bytes
  end_bytes();
  if (last) last_user_is_gone(c);
  if (storage) let_go_of(std::move(storage));
  return released;
}

// The last resort: what stayed of packed cells, where their ops can make them again.
uint64_t give_up_bits(uint64_t want) {
  uint64_t released = 0;
  std::vector<Cell*> ended;
  {
    Trash trash;
    std::lock_guard<std::mutex> lock(graph_lock());
    if (nothing_leaves_locked()) return 0;
    for_each_cell_locked([&](Cell* c) {
      uint32_t unpinned = kAbsent;
      if (released >= want || c->absence != Absence::kPacked || !c->bits_bytes || !may_be_dropped_locked(c)) return;
      if (c->version->recipe->checked && !c->checksum.taken()) return;
      if (!c->state.compare_exchange_strong(unpinned, kAbsent | kBusy, std::memory_order_acq_rel)) return;
      released += c->bits_bytes;
      counters.evictions++;
      counters.evicted_bytes += c->nbytes;
      end_bits_locked(c);
      set_evicted_locked(c->version, true, &trash);
      c->absence = Absence::kEvicted;
      if (end_move_locked(c, true)) ended.push_back(c);
    });
  }
  for (Cell* c : ended) last_user_is_gone(c);
  return released;
}

}  // namespace

void exhume() { shorten(0, 0); }

bool claim_locked(Cell* c) { return !c->small && frozen.load() == 0 && begin_move(c); }

uint64_t leave_claimed(Cell* c, Way way) { return leave(c, way, &drop_later); }

uint64_t let_go(Cell* c, Way way) {
  while (others_are_in_their_ops()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  {
    std::lock_guard<std::mutex> lock(graph_lock());
    if (!claim_locked(c)) return 0;
  }
  return leave(c, way, &drop);
}

// All of a choice leave, or as many as still can.
static uint64_t reclaim_chosen(uint64_t need, uint64_t request) {
  std::vector<Victim> chosen;
  {
    std::lock_guard<std::mutex> lock(graph_lock());
    chosen = choose_victims_locked(need, request);
  }
  uint64_t released = 0;
  for (const Victim& v : chosen) released += leave(v.cell, v.way, &drop_later);
  return released;
}

uint64_t reclaim_callback(void* asking, uint64_t need, uint64_t request, int) {
  if (!budget.open.load(std::memory_order_relaxed) || asking != budget.pool) return 0;
  for (int i = 0; frozen.load() > 0; ++i) {
    if (others_are_in_their_ops()) i = 0;
    if (tl_froze || i == 2000) return 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  Wait wait;
  const ScratchStays stays;
  counters.reclaims++;
  look_for_ended_fixed();
  note_shortage();
  const uint64_t want = need ? need : request;
  poll_transfers();
  uint64_t released = let_planned_go(want, request);
  bool refilled = false;
  if (released < want) note_short();
  if (released < want && budget.options.search >= 0) {
    released += reclaim_chosen(need, request);
    if (released > 0) return released;
    if (budget.options.remap == MM_REMAP_LAST && need == 0) return 0;  // addresses further up are what helps now
  }
  while (released < want) {
    Victim next;
    {
      std::lock_guard<std::mutex> lock(graph_lock());
      next = next_victim_locked();
      if (!next.cell) {
        if (refilled || !refill_victims_locked()) break;
        refilled = true;
        continue;
      }
    }
    const uint64_t n = leave(next.cell, next.way, &drop_later);
    if (n) refilled = false;
    released += n;
  }
  if (released == 0) released = end_kept_ghosts();
  if (released == 0) released = give_up_bits(want);
  while (released == 0 && finish_any_read()) {  // what was read ahead may leave again
    std::lock_guard<std::mutex> lock(graph_lock());
    if (refill_victims_locked()) released = 1;
  }
  // Somebody may have died in the arms of whoever let it go. Bounded: the one who drops may wait for the GIL.
  if (released == 0 && wait_for_dropper(0.05)) released = 1;
  if (released == 0 && others_are_running(tl_depth > 0)) {
    // What others have pinned comes free when their ops end (rule 3); bounded, since they may be waiting for us.
    wait_for_others(0.05);
    std::lock_guard<std::mutex> lock(graph_lock());
    if (refill_victims_locked()) released = 1;
  }
  const uint64_t waited = wait.end();
  counters.stall_ns += waited;
  counters.room_ns += waited;
  note_event(Event::kStall, nullptr, released, waited);
  return released;
}

// ---- the floor ----

static std::atomic<uint64_t> floor_mark{0};

void note_floor(uint64_t bytes) {
  uint64_t seen = floor_mark.load(std::memory_order_relaxed);
  while (seen < bytes && !floor_mark.compare_exchange_weak(seen, bytes)) {
  }
}

uint64_t bytes_that_stay() {
  const uint64_t all = mm_arena_resident(budget.arena);
  const uint64_t elsewhere = resident_cell_bytes.load() + scratch_now();                 // outputs, mostly
  const uint64_t roots = may_be_offloaded() ? newborn_bytes.load() : root_bytes.load();  // newborns are roots
  return all - std::min(all, elsewhere) + escaped_bytes.load() + held_bytes.load() + roots;
}

void note_working_set(uint64_t pinned_bytes, Share at_once) {
  const uint64_t all = mm_arena_resident(budget.arena);
  if (all > most_resident.load(std::memory_order_relaxed)) most_resident = all;  // two threads: one of them is enough
  note_floor(bytes_that_stay() + at_once.of(pinned_bytes + scratch_peak()));
}

static thread_local uint64_t tl_refused_bytes = 0;
static thread_local std::string tl_refused_text;
std::string refusal() { return std::exchange(tl_refused_text, {}); }
uint64_t refused_bytes() {
  tl_refused_text.clear();
  return std::exchange(tl_refused_bytes, 0);
}
void refuse_beside(uint64_t nbytes) { tl_refused_bytes += nbytes; }
void note_refused() { note_floor(refused_bytes()); }
uint64_t floor_bytes() { return floor_mark.load(); }
std::atomic<uint64_t> most_resident{0};
void reset_floor() { floor_mark = most_resident = 0; }

// The arena asks nobody to leave for what could never fit.
static uint64_t may_leave_bytes() {
  uint64_t bytes = 0;
  std::lock_guard<std::mutex> lock(graph_lock());
  for_each_cell_locked([&](const Cell* c) {
    bool drop;
    if (!c->small && c->state.load() == 0 && cost_of_leaving_locked(c, &drop) >= 0) bytes += c->nbytes;
  });
  return bytes;
}

void throw_out_of_memory(uint64_t request) {
  if (const std::string why = budget.pool->broken(); !why.empty())
    TORCH_CHECK(false, "memmgr: ", budget.pool->device.str(), " answers nothing any more: ", why,
                ". An earlier kernel failed; CUDA_LAUNCH_BLOCKING=1 shows which.");
  const uint64_t limit = mm_arena_budget(budget.arena), resident = mm_arena_resident(budget.arena);
  const uint64_t taken = rounded(request);
  tl_refused_bytes = taken + (request <= limit ? resident : resident - std::min(resident, may_leave_bytes()));
  begin_failure(taken);
  std::string text = budget.pool->out_of_memory_words() + std::to_string(request) + " bytes. memmgr: the budget of " +
                     std::to_string(limit) + " bytes is spent: " + std::to_string(resident) +
                     " bytes are in use and nothing more can leave.";
  {
    std::lock_guard<std::mutex> lock(budget.error_lock);
    if (!budget.tier_error.empty()) text += " The disk tier failed: " + budget.tier_error + '.';
  }
  tl_refused_text = text;
  throw c10::OutOfMemoryError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text);
}

}  // namespace memmgr::pager
