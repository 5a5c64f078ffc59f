#include "reclaim.h"

#include <Python.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <thread>

#include "admission.h"
#include "budget.h"
#include "checksum.h"
#include "observe.h"
#include "pools/pool.h"
#include "recipe.h"
#include "rematerialize.h"

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

uint64_t waited_ns() { return tl_waited_ns; }
Wait::Wait() : begun_(now_ns()), before_(tl_waited_ns) {}
uint64_t Wait::end() {
  const uint64_t all = now_ns() - begun_, inner = tl_waited_ns - before_;
  tl_waited_ns = before_ + all;
  return all - std::min(all, inner);
}

// ---- the link to the tier, as it was measured ----

static std::atomic<double> link{1e-9};

void set_link(double seconds_per_byte) { link.store(seconds_per_byte); }
double link_seconds_per_byte() { return link.load(std::memory_order_relaxed); }

static void note_transfer(uint64_t nbytes, uint64_t ns) {
  const double now = static_cast<double>(ns) * 1e-9 / static_cast<double>(nbytes);
  const double known = link.load(std::memory_order_relaxed);
  link.store(known * 0.9 + now * 0.1, std::memory_order_relaxed);
}

static void note_tier_error(int error) {
  counters.tier_errors++;
  std::lock_guard<std::mutex> lock(budget.error_lock);
  budget.tier_error = std::strerror(error);
}

// ---- victims ----

static std::atomic<int> frozen{0};
static thread_local bool tl_froze = false;

void nothing_leaves(bool begin) {
  tl_froze = begin;
  std::lock_guard<std::mutex> lock(graph_lock());  // whoever claims a victim has seen it
  frozen.fetch_add(begin ? 1 : -1);
}

namespace {

struct Victims {
  std::vector<Cell*> queue;  // the last leaves first; null: died
  std::vector<uint64_t> touched;
};

Victims& victims() {
  static auto* v = new Victims;
  return *v;
}

bool may_be_dropped_locked(const Cell* c) {
  const Version* v = c->version;
  return budget.options.may_evict && v && v->recipe && c->storage._unsafe_get_target() &&
         v->recipe->kind->trust.load(std::memory_order_relaxed) == Trust::kYes && recipe_available_locked(v->recipe);
}

bool may_be_offloaded() { return budget.options.may_offload && budget.tier; }

double io_seconds(const Cell* c) {
  return link_seconds_per_byte() * static_cast<double>(c->nbytes) * (c->slot >= 0 ? 1 : 2);
}

// What it costs to have the bytes again; negative: they cannot leave.
double cost_of_leaving_locked(const Cell* c, bool* drop) {
  *drop = false;
  double cost = -1;
  if (c->slot >= 0 || may_be_offloaded()) cost = io_seconds(c);
  if (may_be_dropped_locked(c)) {
    const double again = seconds_to_make_locked(c->version);
    if (cost < 0 || again <= cost) {
      *drop = true;
      return again;
    }
  }
  return cost;
}

// Lower leaves first (the names are those of memmgr.policies.rules.filters).
double score(double cost, uint64_t nbytes, double age) {
  const double m = static_cast<double>(nbytes);
  switch (budget.options.order) {
    case Order::kLru:
      return 1 / age;
    case Order::kLargest:
      return 1 / m;
    case Order::kDelta:
      return 1 / (m * age);
    case Order::kDtr:
      break;
  }
  return (cost + 1e-7) / (m * age);
}

bool refill_locked() {
  Victims& all = victims();
  for (Cell* c : all.queue)
    if (c) c->queued_at = -1;
  all.queue.clear();
  const uint64_t now = ticks();
  struct Found {
    double score;
    Cell* cell;
  };
  std::vector<Found> found;
  for_each_cell_locked([&](Cell* c) {
    if (c->small || c->state.load(std::memory_order_relaxed) != 0) return;
    bool drop;
    const double cost = cost_of_leaving_locked(c, &drop);
    if (cost < 0) return;
    const uint64_t touched = c->last_touch.load(std::memory_order_relaxed);
    found.push_back({score(cost, c->nbytes, static_cast<double>(now > touched ? now - touched : 0) + 1), c});
  });
  std::sort(found.begin(), found.end(), [](const Found& a, const Found& b) { return a.score > b.score; });
  all.touched.resize(found.size());
  for (size_t i = 0; i < found.size(); ++i) {
    found[i].cell->queued_at = static_cast<int32_t>(i);
    all.queue.push_back(found[i].cell);
    all.touched[i] = found[i].cell->last_touch.load(std::memory_order_relaxed);
  }
  return !found.empty();
}

// The next victim, claimed (kBusy); null when the queue is empty.
Cell* next_victim_locked() {
  if (frozen.load() > 0) return nullptr;
  Victims& all = victims();
  while (!all.queue.empty()) {
    const size_t i = all.queue.size() - 1;
    Cell* c = all.queue.back();
    all.queue.pop_back();
    if (!c) continue;
    c->queued_at = -1;
    if (c->last_touch.load(std::memory_order_relaxed) != all.touched[i]) continue;  // used since it was ranked
    if (begin_move(c)) return c;
  }
  return nullptr;
}

}  // namespace

void forget_victim_locked(Cell* c) {
  if (c->queued_at >= 0) victims().queue[static_cast<size_t>(c->queued_at)] = nullptr;
  c->queued_at = -1;
}

// ---- leaving ----

namespace {

// In torture what left stays a while, with other bytes in it: it comes back elsewhere, and who still reads it is found.
void bury(at::DataPtr bytes, uint64_t nbytes) {
  static std::mutex lock;
  static auto* buried = new std::deque<std::pair<at::DataPtr, uint64_t>>;
  static uint64_t total = 0;
  std::memset(bytes.get(), 0xCD, nbytes);
  std::vector<at::DataPtr> end;
  std::lock_guard<std::mutex> hold(lock);
  buried->emplace_back(std::move(bytes), nbytes);
  total += nbytes;
  const uint64_t room = std::min<uint64_t>(1 << 20, mm_arena_budget(budget.arena) / 32);
  while (total > room || buried->size() > 16) {
    end.push_back(std::move(buried->front().first));
    total -= buried->front().second;
    buried->pop_front();
  }
}

// The caller has set kBusy. Returns the bytes released.
uint64_t leave(Cell* c, int turn) {
  StoragePtr storage;
  at::DataPtr bytes;
  bool last = false;
  uint64_t released = 0;
  {
    std::unique_lock<std::mutex> lock(graph_lock());
    const auto give_up = [&] {
      last = end_move_locked(c, false);
      lock.unlock();
      if (last) last_user_is_gone(c);
      if (storage) drop_later(std::move(storage));
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
    if (turn >= 0 && may_be_dropped_locked(c)) drop = turn % 2 == 0 || !(c->slot >= 0 || may_be_offloaded());
    if (!drop && c->slot < 0) {
      const void* from = c->bytes.get();
      lock.unlock();
      const uint64_t begun = now_ns();
      const mm_slot slot = mm_tier_write_now(budget.tier, from, c->nbytes);
      const uint64_t took = now_ns() - begun;
      lock.lock();
      if (slot >= 0) {
        c->slot = slot;
        counters.offloads++;
        counters.offload_bytes += c->nbytes;
        note_transfer(c->nbytes, took);
      } else {
        note_tier_error(static_cast<int>(-slot));
        if (!may_be_dropped_locked(c)) return give_up();
        drop = true;
      }
      // Somebody came for it meanwhile: it stays, clean.
      if (turn < 0 && (c->state.load() & kPinMask)) return give_up();
    } else if (!drop) {
      counters.clean_drops++;
    }
    const uint64_t nth = counters.evictions.load() + counters.offloads.load();
    if (budget.options.verify || (budget.options.sample && nth % budget.options.sample == 0)) {
      const void* from = c->bytes.get();
      lock.unlock();
      const uint64_t sum = checksum(from, c->nbytes);
      lock.lock();
      c->checksum = sum;
      c->has_checksum = true;
      if (drop && !may_be_dropped_locked(c)) return give_up();
    }
    Trash trash;
    if (drop) {
      counters.evictions++;
      counters.evicted_bytes += c->nbytes;
      c->absence = Absence::kEvicted;
      set_evicted_locked(c->version, true, &trash);
    } else {
      c->absence = Absence::kOffloaded;
    }
    note_event(drop ? Event::kEvict : Event::kOffload, c->version ? c->version->recipe : nullptr, c->nbytes, 0);
    if (storage) show_bytes(storage.get(), nullptr, c);
    bytes = std::move(c->bytes);
    c->bytes.clear();
    resident_cell_bytes -= c->nbytes;
    if (c->outside) mm_arena_add_outside(budget.arena, -static_cast<int64_t>(c->nbytes));
    mm_arena_note_virtual(budget.arena, static_cast<int64_t>(c->nbytes));
    absent_cells++;
    released = c->nbytes;
    c->outside = false;
    last = end_move_locked(c, true);
    lock.unlock();
  }
  if (budget.options.torture && bytes.get_deleter() == pool_deleter())
    bury(std::move(bytes), released);
  else
    bytes.clear();
  if (last) last_user_is_gone(c);
  if (storage) drop_later(std::move(storage));
  return released;
}

}  // namespace

uint64_t let_go(Cell* c, int turn) {
  {
    std::lock_guard<std::mutex> lock(graph_lock());
    if (c->small || frozen.load() > 0 || !begin_move(c)) return 0;
  }
  return leave(c, turn);
}

uint64_t reclaim_callback(void*, uint64_t need, uint64_t request, int) {
  if (!budget.open.load(std::memory_order_relaxed)) return 0;
  for (int i = 0; frozen.load() > 0; ++i) {
    if (tl_froze || i == 2000) return 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  Wait wait;
  counters.reclaims++;
  const uint64_t want = need ? need : request;
  uint64_t released = 0;
  bool refilled = false;
  while (released < want) {
    Cell* c;
    {
      std::lock_guard<std::mutex> lock(graph_lock());
      c = next_victim_locked();
      if (!c) {
        if (refilled || !refill_locked()) break;
        refilled = true;
        continue;
      }
    }
    const uint64_t n = leave(c, -1);
    if (n) refilled = false;
    released += n;
  }
  if (released == 0 && others_are_running()) {
    // What others have pinned comes free when their ops end (rule 3); bounded, since they may be waiting for us.
    wait_for_others(0.05);
    std::lock_guard<std::mutex> lock(graph_lock());
    if (refill_locked()) released = 1;
  }
  const uint64_t waited = wait.end();
  counters.stall_ns += waited;
  note_event(Event::kStall, nullptr, released, waited);
  return released;
}

// ---- coming back ----

void check_sum(const Cell* c, const void* data) {
  if (!c->has_checksum || checksum(data, c->nbytes) == c->checksum) return;
  TORCH_CHECK(false, "memmgr: ", c->nbytes, " bytes came back other than they left (",
              c->absence == Absence::kEvicted ? "rematerialized" : "read back",
              "). The run must not go on with them; please report this.");
}

// What cannot be read back counts as evicted from here on, if it can be made again. The caller has the cell busy.
static bool make_instead(Cell* c) {
  Trash trash;
  std::lock_guard<std::mutex> lock(graph_lock());
  if (!may_be_dropped_locked(c)) return false;
  set_evicted_locked(c->version, true, &trash);
  c->absence = Absence::kEvicted;
  trash.slots.push_back(std::exchange(c->slot, -1));
  return true;
}

void bring_back(Cell* c) {
  Absence absence;
  {
    std::unique_lock<std::mutex> lock(graph_lock());
    for (;;) {
      uint32_t state = c->state.load(std::memory_order_acquire);
      if (!(state & (kAbsent | kBusy))) return;
      if (state & kBusy) {
        lock.unlock();
        {
          WithoutGil released;
          lock.lock();
          residency_changed().wait(lock, [&] { return !(c->state.load() & kBusy); });
          lock.unlock();
        }
        lock.lock();
        continue;
      }
      if (c->state.compare_exchange_strong(state, state | kBusy, std::memory_order_acq_rel)) break;
    }
    absence = c->absence;
  }
  Wait wait;
  at::DataPtr bytes;
  try {
    if (absence == Absence::kEvicted) {
      try {
        bytes = rematerialize(c);
      } catch (const c10::OutOfMemoryError&) {
        if (c->slot < 0) throw;  // else the copy below takes no room beside its own
      }
    }
    if (!bytes) {
      bytes = pool_allocate(c->nbytes);
      if (absence == Absence::kFill) {
        std::memset(bytes.get(), 0, c->nbytes);
      } else {
        TORCH_CHECK(c->slot >= 0, "memmgr: these bytes were lost when an earlier budget could not bring them back");
        const uint64_t reading = now_ns();
        const int wrong = mm_tier_read_now(budget.tier, c->slot, bytes.get());
        if (wrong < 0) {
          note_tier_error(-wrong);
          TORCH_CHECK(make_instead(c), "memmgr: the disk tier failed: reading ", c->nbytes,
                      " bytes back: ", std::strerror(-wrong));
          absence = Absence::kEvicted;
          bytes.clear();
          bytes = rematerialize(c);
        } else {
          note_transfer(c->nbytes, now_ns() - reading);
          counters.reloads++;
          counters.reload_bytes += c->nbytes;
        }
      }
    }
    check_sum(c, bytes.get());
  } catch (...) {
    end_move(c, true);
    throw;
  }
  bool last;
  const uint64_t waited = wait.end();
  (absence == Absence::kEvicted ? counters.remat_ns : counters.stall_ns) += waited;
  {
    Trash trash;
    std::lock_guard<std::mutex> lock(graph_lock());
    if (absence != Absence::kEvicted)
      note_event(Event::kReload, c->version ? c->version->recipe : nullptr, c->nbytes, waited);
    if (auto* s = static_cast<c10::StorageImpl*>(c->storage._unsafe_get_target())) show_bytes(s, bytes.get(), c);
    c->bytes = std::move(bytes);
    resident_cell_bytes += c->nbytes;
    mm_arena_note_virtual(budget.arena, -static_cast<int64_t>(c->nbytes));
    absent_cells--;
    if (c->version) set_evicted_locked(c->version, false, &trash);
    c->absence = Absence::kNone;
    c->has_checksum = false;
    last = end_move_locked(c, false);
  }
  if (last) last_user_is_gone(c);
}

// ---- the floor ----

static std::atomic<uint64_t> floor_mark{0};

void note_floor(uint64_t bytes) {
  uint64_t seen = floor_mark.load(std::memory_order_relaxed);
  while (seen < bytes && !floor_mark.compare_exchange_weak(seen, bytes)) {
  }
}
static thread_local uint64_t tl_refused_bytes = 0;
void note_refused() { note_floor(std::exchange(tl_refused_bytes, 0)); }
uint64_t floor_bytes() { return floor_mark.load(); }
void reset_floor() { floor_mark.store(0); }

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
  const uint64_t limit = mm_arena_budget(budget.arena), resident = mm_arena_resident(budget.arena);
  tl_refused_bytes = request + (request <= limit ? resident : resident - std::min(resident, may_leave_bytes()));
  std::string text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate " + std::to_string(request) +
                     " bytes. memmgr: the budget of " + std::to_string(limit) +
                     " bytes is spent: " + std::to_string(resident) + " bytes are in use and nothing more can leave.";
  {
    std::lock_guard<std::mutex> lock(budget.error_lock);
    if (!budget.tier_error.empty()) text += " The disk tier failed: " + budget.tier_error + '.';
  }
  throw c10::OutOfMemoryError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text);
}

}  // namespace memmgr::pager
