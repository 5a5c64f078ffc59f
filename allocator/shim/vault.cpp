// The CPU plug-in and the vault: how a request that would pass the budget is met without Python (design §4).
#include <pthread.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <chrono>

#include "shim.h"

namespace memmgr {

Shim g;
thread_local bool tl_no_reclaim = false;
thread_local bool tl_trial = false;
thread_local bool tl_recomputing = false;
thread_local uint64_t tl_refused_floor = 0;
thread_local bool tl_ask_daemon = true;
thread_local int tl_side = MM_SIDE_LOW;
thread_local uint64_t tl_stall_ns = 0;

uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000ull + static_cast<uint64_t>(t.tv_nsec);
}

// Four lanes of multiply-rotate over 32-byte strides: limited by memory, not by arithmetic. Detects changes; no defence
// against somebody who means to collide.
uint64_t checksum_bytes(const void* p, size_t n) {
  const uint64_t prime = 0x9E3779B185EBCA87ull;
  uint64_t lane[4] = {1, 2, 3, 4};
  const auto* bytes = static_cast<const unsigned char*>(p);
  size_t i = 0;
  for (; i + 32 <= n; i += 32) {
    uint64_t w[4];
    std::memcpy(w, bytes + i, 32);
    for (int k = 0; k < 4; ++k) {
      lane[k] = (lane[k] ^ w[k]) * prime;
      lane[k] = (lane[k] << 31) | (lane[k] >> 33);
    }
  }
  uint64_t h = n * prime;
  for (uint64_t v : lane) h = ((h ^ v) * prime) ^ (h >> 29);
  for (; i < n; ++i) h = (h ^ bytes[i]) * prime;
  return h ^ (h >> 32);
}

// ---- the rules for letting go ----

bool versions_current(const Cell* c) {
  for (const Version& v : c->versions)
    if (v.counter.current_version() != v.at) return false;
  return true;
}

// The same for the counters that autograd itself would look at.
bool saved_current(const Cell* c) {
  for (const Version& v : c->versions)
    if (v.saved && v.counter.current_version() != v.at) return false;
  return true;
}

// Nobody else can reach the bytes. A storage that has a Python object counts two or more, so it is never ours alone:
// somebody may hold that object without holding a tensor.
bool ours_alone_locked(const Cell* c) {
  return c->strong && c->gone == PRESENT && c->strong.use_count() == 1 && !c->busy && !c->pinned && !c->unsettled &&
         !c->stale && data_present(c->strong.get()) && c->nbytes > 0 &&
         static_cast<int64_t>(c->strong->nbytes()) == c->nbytes;
}

void disarm_locked(Cell* c) {
  if (c->armed != KEEP) {
    c->armed = KEEP;
    g.armed[static_cast<size_t>(c->armed_at)] = nullptr;
    g.armed_bytes -= std::min<uint64_t>(g.armed_bytes, c->nbytes);
  }
}

bool can_evict(const Cell* c) {
  return c->recipe && c->recipe->ok && c->recipe->kind && c->recipe->kind->trust.load() == TRUST_YES && !c->exposed;
}

// Backward asks for the bytes when the run holds up to its floor, the bytes themselves among that. What making them
// takes at once beyond that has to be there, or dropping them ends the run, where offloading would not.
bool room_to_remake(const Cell* c) {
  if (!g.tier || !g.may_offload || !c->recipe) return true;
  const uint64_t budget = mm_arena_budget(g.arena);
  if (budget == MM_UNLIMITED) return true;
  const uint64_t floor = std::min(budget, g.floor_bytes.load(std::memory_order_relaxed));
  return c->recipe->room_bytes <= budget - floor + static_cast<uint64_t>(c->nbytes);
}

// Lets the bytes of `c` go if they are ours alone. Called with the lock held; the lock is dropped while bytes are
// copied
// (`busy` keeps the cell alive then) or freed, so the caller must not touch `c` afterwards. With only_free, nothing
// that needs a copy is done now.
bool release_cell_locked(Cell* c, uint8_t action, std::unique_lock<std::mutex>& lock, bool only_free) {
  const bool drop = action == EVICT && g.may_evict && can_evict(c) && (c->by_plan || room_to_remake(c));
  c->by_plan = false;
  disarm_locked(c);
  if (!ours_alone_locked(c) || !versions_current(c)) return false;
  if (c->incoming.get()) return false;
  uint8_t gone = PRESENT;
  if (c->slot >= 0) {
    const int state = mm_tier_poll(g.tier, c->slot);
    if (state == 1) {
      gone = OFFLOADED;  // clean: the copy was begun when the bytes were ours alone, and nobody has had them since
    } else if (state < 0) {
      g.n.tier_errors++;
      g.tier_error = std::strerror(-state);
      mm_slot bad = c->slot;
      c->slot = -1;
      c->slot_state = NO_SLOT;
      mm_tier_free(g.tier, bad);
    } else if (only_free) {
      return false;
    } else {
      // A write is under way. To offload, waiting for it is cheaper than beginning another one; to evict, it has to end
      // before the bytes go, and its copy goes with them.
      c->busy = true;
      const mm_slot slot = c->slot;
      if (drop) {
        c->slot = -1;
        c->slot_state = NO_SLOT;
      }
      lock.unlock();
      int rc = 0;
      if (drop)
        mm_tier_free(g.tier, slot);
      else
        rc = mm_tier_order(g.tier, slot);
      lock.lock();
      c->busy = false;
      if (rc < 0 || !ours_alone_locked(c) || (!drop && c->slot != slot)) return false;
      if (!drop) gone = OFFLOADED;
    }
  }
  if (gone == OFFLOADED) g.n.clean_drops++;
  // Asked again: the recipe may have been cut while the lock was not held.
  if (gone == PRESENT && drop && can_evict(c)) gone = EVICTED;
  if (gone == PRESENT) {
    if (only_free) return false;
    if (g.tier && g.may_offload) {
      c->busy = true;
      const void* src = c->strong->_mutable_data_ptr_no_checks().get();
      lock.unlock();
      const mm_slot slot = mm_tier_write_now(g.tier, src, static_cast<uint64_t>(c->nbytes));
      lock.lock();
      c->busy = false;
      if (slot >= 0) {
        if (!ours_alone_locked(c) || !versions_current(c)) {
          // Somebody took the bytes meanwhile: the copy may not be what they leave behind.
          lock.unlock();
          mm_tier_free(g.tier, slot);
          lock.lock();
          return false;
        }
        g.n.offloads++;
        g.n.offload_bytes += static_cast<uint64_t>(c->nbytes);
        c->slot = slot;
        c->slot_state = CLEAN;
        gone = OFFLOADED;
      } else {
        g.n.tier_errors++;
        g.tier_error = std::strerror(static_cast<int>(-slot));
      }
    }
    if (gone == PRESENT && g.may_evict && can_evict(c)) gone = EVICTED;
    if (gone == PRESENT) return false;
  }
  Bits* bits = nullptr;
  if (gone == EVICTED && worth_bits(c)) {
    Kind* kind = c->recipe->kind;  // lives as long as the process; the recipe may be cut meanwhile
    c->busy = true;
    const void* p = c->strong->_mutable_data_ptr_no_checks().get();
    lock.unlock();
    bits = pack_bits(p, c->nbytes);
    lock.lock();
    c->busy = false;
    if (!ours_alone_locked(c) || !versions_current(c) || (!bits && !can_evict(c))) {
      end_bits(bits, false);
      return false;
    }
    if (kind) kind->binary.store(bits != nullptr, std::memory_order_relaxed);
  }
  const uint64_t nth = gone == EVICTED ? g.n.evictions.load() : g.n.offloads.load();
  if (g.verify || (g.sample && nth % g.sample == 0)) {
    const void* p = c->strong->_mutable_data_ptr_no_checks().get();
    if (g.device) {  // the bytes have to be fetched, which waits for the device
      c->busy = true;
      lock.unlock();
      const mm_slot slot = c->slot;
      uint64_t sum = 0;
      const bool got = last_checksum_of(g.place, p, static_cast<size_t>(c->nbytes), &sum);
      lock.lock();
      c->busy = false;
      if (!got || c->slot != slot || !ours_alone_locked(c) || !versions_current(c)) return false;
      if (gone == EVICTED && !can_evict(c)) return false;
      c->checksum = sum;
    } else {
      c->checksum = checksum_bytes(p, static_cast<size_t>(c->nbytes));
    }
    c->has_checksum = true;
  }
  if (gone == EVICTED) {
    g.n.evictions++;
    g.n.evicted_bytes += static_cast<uint64_t>(c->nbytes);
    if (bits) {
      g.n.binarized++;
      g.n.binarized_bytes += static_cast<uint64_t>(c->nbytes);
    }
    note_event(HAPPENED_EVICT, c, 0);
  } else {
    g.offloaded_cells++;
    g.offloaded_bytes += static_cast<uint64_t>(c->nbytes);
    note_event(HAPPENED_OFFLOAD, c, 0);
  }
  c->gone = gone;
  if (g.device) c->filled_on = mm_device_home(g.device, c->strong->_mutable_data_ptr_no_checks().get());
  g.handled_bytes -= std::min<uint64_t>(g.handled_bytes, c->nbytes);
  g.gone_bytes += static_cast<uint64_t>(c->nbytes);
  // The bytes go, the storage object stays: its end could take the GIL.
  at::DataPtr bytes = std::move(c->strong->_mutable_data_ptr_no_checks());
  c->strong->set_data_ptr_noswap(at::DataPtr(nullptr, bytes.device()));
  const int64_t n = c->nbytes;
  c->bits = bits;
  c->busy = bits != nullptr;  // whoever wants them waits until they are counted
  lock.unlock();
  bytes.clear();
  if (g.arena) mm_arena_note_virtual(g.arena, n);
  if (bits) count_bits(bits);
  lock.lock();
  if (bits) c->busy = false;
  return true;
}

// Gives up what was brought back too early, the last needed first: the copies below are still good.
uint64_t cancel_prefetches(uint64_t want, std::unique_lock<std::mutex>& lock) {
  uint64_t released = 0;
  while (released < want && g.incoming_bytes > 0) {
    Cell* c = g.oldest;
    while (c && (!c->incoming.get() || c->busy)) c = c->next;
    if (!c) break;
    c->busy = true;
    const mm_slot slot = c->slot;
    at::DataPtr bytes = take_incoming_locked(c);
    const auto n = static_cast<uint64_t>(c->nbytes);
    lock.unlock();
    mm_tier_order(g.tier, slot);  // nobody writes into the block any more
    bytes.clear();
    lock.lock();
    c->busy = false;
    released += n;
    g.n.prefetch_cancels++;
  }
  return released;
}

// Takes what was ranked, in its order; then, if that was not enough, whatever may leave, stalest first.
uint64_t release_from_vault(uint64_t want) {
  uint64_t released = 0;
  std::unique_lock<std::mutex> lock(g.mu);
  // Bounded: every round takes at least one entry off the list, or puts one back, of which there are not more than
  // these.
  size_t put_back = g.armed.size();
  while (released < want && g.armed_next < g.armed.size()) {
    const size_t at = g.armed_next++;
    Cell* c = g.armed[at];
    if (!c || c->armed == KEEP) continue;
    if (c->by_plan && put_back > 0 && !ours_alone_locked(c)) {  // a replay is reading it: its turn comes again
      put_back--;
      g.armed[at] = nullptr;
      c->armed_at = static_cast<int64_t>(g.armed.size());
      g.armed.push_back(c);
      continue;
    }
    const uint8_t action = c->armed;
    const auto n = static_cast<uint64_t>(c->nbytes);
    if (release_cell_locked(c, action, lock, false)) released += n;
  }
  if (released < want) released += cancel_prefetches(want - released, lock);
  if (released >= want) return released;
  g.plan_short = true;  // the policies rank from here on
  // The list may change whenever the lock is dropped, so begin again after each release.
  bool found = true;
  uint32_t guard = 0;
  while (released < want && found && guard++ < 1000000) {
    found = false;
    for (Cell* c = g.oldest; c; c = c->next) {
      if (!ours_alone_locked(c)) continue;
      const bool evictable = g.may_evict && can_evict(c) && room_to_remake(c);
      if (!evictable && !(g.tier && g.may_offload) && c->slot < 0) continue;
      const auto n = static_cast<uint64_t>(c->nbytes);
      const uint64_t errors = g.n.tier_errors.load();
      // DELTA's comparison, without the ancestors: this is the net below the ranking, and it must not search.
      const bool slow = evictable && seconds_of(c->recipe) < g.link_seconds_per_byte * static_cast<double>(n);
      const uint8_t action = evictable && (!g.may_offload || (slow && c->slot < 0)) ? EVICT : OFFLOAD;
      if (release_cell_locked(c, action, lock, false)) {
        released += n;
        g.n.unranked++;
        found = true;
        break;
      }
      if (g.n.tier_errors.load() != errors) {
        found = false;  // the tier fails: do not try every cell
        break;
      }
    }
  }
  return released;
}

// ---- what cannot leave ----

// The bytes of listed cells that the program holds as well; O(cells), so the callers ask only when it could matter.
static uint64_t program_bytes_locked() {
  uint64_t held = 0;
  uint32_t cells = 0;
  for (Cell* c = g.oldest; c; c = c->next, ++cells)
    if (c->strong && c->gone == PRESENT && c->strong.use_count() > 1) held += static_cast<uint64_t>(c->nbytes);
  g.scanned_cells = cells;
  g.since_scan = 0;
  return held;
}

// Between two scans what the program holds is taken to be what it was, so one is due now and then even if that says
// that nothing new is to be seen: often enough that a skip connection is noticed, and at 64 cells a call.
static bool scan_due_locked() { return ++g.since_scan * 64 > g.scanned_cells; }

static void raise_to(std::atomic<uint64_t>& mark, uint64_t value) {
  uint64_t seen = mark.load(std::memory_order_relaxed);
  while (seen < value && !mark.compare_exchange_weak(seen, value)) {
  }
}

void raise_floor(uint64_t value) { raise_to(g.floor_bytes, value); }

// A trial need not be, and what a recomputation needs could have been spared by offloading: neither says what the run
// needs.
bool counts_for_floor() { return !tl_no_reclaim && !tl_trial && !(tl_recomputing && g.tier && g.may_offload); }

// floor: what is resident and may not leave, at its worst. held: the same seen between two ops, without their
// temporaries.
void scan_floor(bool at_op_boundary) {
  if (!g.arena || !g.watching.load(std::memory_order_relaxed)) return;
  // Bits are there because something was evicted; offloaded it would leave none.
  const uint64_t all = mm_arena_resident(g.arena), resident = all - std::min<uint64_t>(all, g.bits_bytes.load());
  auto& mark = at_op_boundary ? g.held_peak_bytes : g.floor_bytes;
  std::unique_lock<std::mutex> lock(g.mu, std::try_to_lock);
  if (!lock.owns_lock()) return;
  const uint64_t free_to_go = std::min(g.handled_bytes + g.incoming_bytes, resident);
  const uint64_t estimate = resident - free_to_go + g.held_estimate.load(std::memory_order_relaxed);
  if (estimate <= mark.load(std::memory_order_relaxed) && !scan_due_locked()) return;
  const uint64_t held = program_bytes_locked();
  g.held_estimate.store(held, std::memory_order_relaxed);
  raise_to(mark, resident - free_to_go + std::min(held, free_to_go));
}

// ---- the allocator ----

void throw_out_of_memory(size_t bytes) {
  mm_arena_stats s{};
  if (g.arena) mm_arena_stats_get(g.arena, &s);
  const uint64_t resident = s.live_bytes + s.outside_bytes;
  const uint64_t may_leave = std::min(g.handled_bytes + g.incoming_bytes, resident);
  uint64_t floor = std::max<uint64_t>(g.floor_bytes.load(), resident - may_leave + g.held_estimate.load() + bytes);
  // Reclaim has taken all that could go, so what is there now has to be, whatever the last look at it said.
  if (!tl_no_reclaim) floor = std::max<uint64_t>(floor, resident + bytes);
  // A trial may fail, and a recomputation may find another way. One that does not ends the run: see raise_floor().
  if (counts_for_floor())
    raise_to(g.floor_bytes, floor);
  else if (!tl_no_reclaim && !tl_trial)
    tl_refused_floor = floor;
  auto mib = [](uint64_t b) {
    return std::to_string(b / 1048576) + "." + std::to_string((b % 1048576) * 10 / 1048576) + " MiB";
  };
  std::string text =
      std::string(out_of_memory_words()) + std::to_string(bytes) + " bytes. memmgr: the budget of " +
      mib(s.budget_bytes) + " is spent: " + mib(resident) +
      " resident, of which nothing more can be let go. Smallest budget that would have worked so far: " + mib(floor) +
      " (" + std::to_string(floor) + " bytes).";
  if (!g.tier_error.empty())
    text += std::string(g.device ? " The host" : " The disk") + " tier failed: " + g.tier_error + ".";
  TORCH_CHECK_WITH(OutOfMemoryError, false, text);
}

// Without the GIL nobody may wait for it here: whoever has it may wait for a lock that our caller holds. So the daemon
// is asked, for a limited time.
static uint64_t ask_daemon(uint64_t want) {
  if (g.daemon_fd < 0) return 0;
  std::unique_lock<std::mutex> lock(g.ask_mu);
  const uint64_t ticket = ++g.asked;
  g.ask_bytes = want;
  const uint64_t one = 1;
  if (write(g.daemon_fd, &one, sizeof one) != sizeof one) return 0;
  g.answered_cv.wait_for(lock, std::chrono::seconds(2), [&] { return g.answered >= ticket; });
  return g.answered >= ticket ? g.answer_bytes : 0;
}

static uint64_t reclaim(void*, uint64_t need, uint64_t request, int attempt) {
  const uint64_t t0 = now_ns();
  const uint64_t want = need ? need : request;
  // Asleep nobody notes on which streams tensors are used, so none may be used at all while they leave.
  const bool unseen = g.device && !g.watching.load(std::memory_order_relaxed);
  if (unseen && !quiet_device()) return 0;
  uint64_t released = g.search >= 0 ? release_chosen(need, request) : release_from_vault(want);
  if (g.search >= 0 && !released) {
    // No choice makes a run. Where addresses further up may help, only bytes can be missing now.
    if (g.remap == MM_REMAP_LAST && need == 0) return 0;
    released = release_from_vault(want);
  }
  if (!released && g.on_empty && attempt < 4) {
    if (PyGILState_Check()) {
      // The vault is empty and this thread holds the GIL already: Python may have something (design §4).
      PyObject *et, *ev, *tb;
      PyErr_Fetch(&et, &ev, &tb);
      PyObject* r = PyObject_CallFunction(g.on_empty, "K", static_cast<unsigned long long>(want));
      if (r && PyLong_Check(r)) released = PyLong_AsUnsignedLongLong(r);
      if (!r) PyErr_Clear();
      Py_XDECREF(r);
      PyErr_Restore(et, ev, tb);
    } else if (tl_ask_daemon) {
      released = ask_daemon(want);
    }
    // What Python handed over is in the vault now.
    if (unseen && !quiet_device()) return released;
    released += release_from_vault(want);
  }
  const uint64_t dt = now_ns() - t0;
  tl_stall_ns += dt;
  g.n.stall_ns += dt;
  note_stall(released, dt);
  return released;
}

// Memory that another library or process can write: NumPy's, a file's, shared memory, a DLPack capsule's.
bool foreign_memory(const c10::StorageImpl* s) {
  const bool here = managed_here(s);
  if (!here && s->device_type() != c10::DeviceType::CPU) return false;
  if (!s->resizable()) return true;
  const auto deleter = const_cast<c10::StorageImpl*>(s)->_mutable_data_ptr_no_checks().get_deleter();
  if (s->nbytes() == 0 || deleter == &arena_free || deleter == &device_free) return false;
  const c10::Allocator* usual = here ? g.previous : c10::GetAllocator(c10::DeviceType::CPU);
  return !usual || deleter != usual->raw_deleter();
}

// torch's profiler sees what this allocator does, as it sees torch's own.
void tell_profiler(mm_arena* arena, const at::Device& where, void* p, bool allocated) {
  const auto block = static_cast<int64_t>(mm_arena_block_bytes(arena, p));
  const uint64_t live = mm_arena_resident(arena) - (allocated ? 0 : static_cast<uint64_t>(block));
  c10::reportMemoryUsageToProfiler(p, allocated ? block : -block, live, live, where);
}

void arena_free(void* p) {
  if (!p || !g.host_arena) return;
  if (C10_UNLIKELY(c10::memoryProfilingEnabled())) tell_profiler(g.host_arena, at::DeviceType::CPU, p, false);
  mm_arena_free(g.host_arena, p);
}

struct CpuAllocator final : c10::Allocator {
  c10::Allocator* previous = nullptr;
  at::DataPtr allocate(size_t n) override {
    const at::Device cpu(at::DeviceType::CPU);
    if (n == 0) return {nullptr, nullptr, &arena_free, cpu};
    // Storages remember this allocator, and may grow when no budget is open, or one on a device.
    if (!g.installed.load(std::memory_order_relaxed) || g.forked.load(std::memory_order_relaxed) || g.device)
      return previous->allocate(n);
    void* p = tl_no_reclaim ? mm_arena_try_alloc(g.arena, n, 0) : mm_arena_alloc_at(g.arena, n, tl_side);
    if (!p) throw_out_of_memory(n);
    if (C10_UNLIKELY(c10::memoryProfilingEnabled())) tell_profiler(g.arena, cpu, p, true);
    if (n > g.largest_request.load(std::memory_order_relaxed)) g.largest_request.store(n, std::memory_order_relaxed);
    if (n >= 512 && counts_for_floor()) scan_floor(false);
    return {p, p, &arena_free, cpu};
  }
  at::DeleterFnPtr raw_deleter() const override { return &arena_free; }
  void copy_data(void* dest, const void* src, std::size_t count) const override { default_copy_data(dest, src, count); }
};

static CpuAllocator* the_allocator() {
  static auto* a = new CpuAllocator;  // never destroyed: storages remember it
  return a;
}

static void forked_child() {
  new (&g.mu) std::mutex;
  new (&g.ask_mu) std::mutex;
  new (&g.answered_cv) std::condition_variable;
  forked_watch();
  g.forked.store(true);
  if (g.installed.load() && !g.device) c10::SetAllocator(at::DeviceType::CPU, g.previous, 255);
  g.installed.store(false);
}

int install_allocator() {
  static bool once = [] {
    pthread_atfork(nullptr, nullptr, forked_child);
    return true;
  }();
  (void)once;
  if (!g.arena || g.forked.load()) return -1;
  if (g.device) {
    mm_arena_set_reclaim(g.arena, &reclaim, nullptr);
    return install_device_allocator();
  }
  c10::Allocator* now = c10::GetAllocator(at::DeviceType::CPU);
  if (now != the_allocator()) the_allocator()->previous = now;
  g.previous = the_allocator()->previous;
  mm_arena_set_reclaim(g.arena, &reclaim, nullptr);
  g.installed.store(true);
  c10::SetAllocator(at::DeviceType::CPU, the_allocator(), 255);
  return 0;
}

void uninstall_allocator() {
  if (!g.installed.load()) return;
  if (g.device) return uninstall_device_allocator();
  c10::SetAllocator(at::DeviceType::CPU, g.previous, 255);
  g.installed.store(false);
}

}  // namespace memmgr
