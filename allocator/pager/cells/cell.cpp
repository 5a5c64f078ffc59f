#include "cells/cell.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/ScopeExit.h>

#include <cstring>

#include "base/budget.h"
#include "base/private_member.h"
#include "cells/cell_internal.h"
#include "cells/names.h"
#include "cells/stream_order.h"
#include "guards/escape.h"
#include "plan/timeline.h"
#include "pools/pool.h"
#include "python/fork.h"
#include "recipes/recipe.h"
#include "residency/reclaim.h"
#include "residency/transfer.h"

namespace memmgr::pager {

SumUnderLock resident_cell_bytes;
SumUnderLock root_bytes;
SumUnderLock escaped_bytes;
SumUnderLock newborn_bytes;
SumUnderLock held_bytes;
SumUnderLock recipe_bytes;
std::atomic<int64_t> absent_cells{0};

// Never destroyed: storages outlive statics.
std::mutex& graph_lock() {
  static auto& m = taken_by_forks(new std::mutex);
  return m;
}

Recycled<Cell>& cell_memory() {
  static auto* m = new Recycled<Cell>;
  return *m;
}

Recycled<Version>& version_memory() {
  static auto* m = new Recycled<Version>;
  return *m;
}

std::condition_variable& residency_changed() {
  static auto* c = new std::condition_variable;
  return *c;
}

static std::vector<Cell*>& registry() {
  static auto* r = new std::vector<Cell*>;
  return *r;
}

size_t count_cells_locked() { return registry().size(); }
Cell* cell_at_locked(size_t index) { return registry()[index]; }

void register_locked(Cell* c) {
  c->index = registry().size();
  registry().push_back(c);
}

static void set_root_locked(Cell* c, bool root) {
  if (c->root == root) return;
  c->root = root;
  if (root)
    root_bytes += c->nbytes;
  else
    root_bytes -= c->nbytes;
  count_held_locked(c);
}

void count_root_locked(Cell* c) {
  const Version* v = c->version;
  // Once it is written, what was filled has no recipe any more: a budget without a tier needs room for it then.
  const bool made_again = v && v->recipe ? !v->recipe->filled : v && v->presumed;
  set_root_locked(c, !c->small && v && !v->temporary && !made_again && !has_file_copy(c));
}

uint64_t moved_by_ended[kPurposes];

void unregister_locked(Cell* c) {
  moved_by_ended[static_cast<size_t>(c->purpose)] += c->moved_bytes;
  set_root_locked(c, false);
  forget_victim_locked(c);
  forget_price_locked(c);
  forget_in_timeline_locked(c);
  auto& cells = registry();
  cells[c->index] = cells.back();
  cells[c->index]->index = c->index;
  cells.pop_back();
}

void forget_moved() {
  std::lock_guard<std::mutex> lock(graph_lock());
  for (uint64_t& bytes : moved_by_ended) bytes = 0;
  for_each_cell_locked([](Cell* c) { c->moved_bytes = 0; });
}

void Trash::end() {
  for (const mm_slot slot : slots)
    if (budget.tier) mm_tier_free(budget.tier, slot);
  slots.clear();
  bytes.clear();
  ranges.clear();
}

// ---- storages and their cells ----

static bool of_pool(const c10::StorageImpl* s) {
  return budget.pool && pointer_of(s).get_deleter() == budget.pool->deleter();
}

static uint64_t next_serial = 1;

uint64_t serial_of_next_locked() { return next_serial; }

// How far behind the beginning of its block the bytes lie.
static uintptr_t lead_of(const at::DataPtr& p) {
  return reinterpret_cast<uintptr_t>(p.get()) - reinterpret_cast<uintptr_t>(p.get_context());
}

bool adoptable(const c10::StorageImpl* s) {
  const at::DataPtr& p = pointer_of(s);
  const Pool* pool = budget.pool;
  if (!p.get() || !pool || budget.forked || p.device().type() != pool->device.type()) return false;
  if (!pool->on_host() && p.device().index() != pool->device.index()) return false;
  if (s->sym_nbytes().is_heap_allocated() || s->nbytes() == 0) return false;
  const auto deleter = p.get_deleter();
  if (deleter == pool->deleter()) return lead_of(p) < kLine;
  if (!pool->on_host()) return false;
  return deleter == c10::GetDefaultCPUAllocator()->raw_deleter() ? lead_of(p) == 0 : is_mapped(s);
}

void grows_in_pool(c10::StorageImpl* s) {
  static c10::Allocator* const torchs = c10::GetDefaultCPUAllocator();
  if (s->allocator() == torchs && budget.pool && budget.pool->on_host()) s->set_allocator(budget.pool->allocator());
}

Cell* adopt(c10::StorageImpl* s, uint32_t pins) {
  if (C10_UNLIKELY(!of_pool(s) && is_mapped(s))) {
    bool shared = share_mapping(s);
    for (Cell* c; adoptable(s); shared |= share_mapping(s)) {  // another one may have been made over these bytes
      {
        std::lock_guard<std::mutex> lock(graph_lock());
        c = adopt_locked(s, pins + shared, ticks());
      }
      if (!c) continue;
      if (shared) {  // pinned, it is in the mapping until then
        const auto unpinned = c10::make_scope_exit([c] { unpin(c); });
        escape(c, Escape::kSlice);
      }
      return c;
    }
  }
  std::lock_guard<std::mutex> lock(graph_lock());
  return adopt_locked(s, pins, ticks());
}

Cell* adopt_locked(c10::StorageImpl* s, uint32_t pins, uint64_t touched_ticks, bool known_adoptable) {
  if (Cell* c = cell_of(s)) {
    c->state.fetch_add(pins);
    return c;
  }
  if (!known_adoptable && !adoptable(s)) return nullptr;
  const bool mapped = !of_pool(s) && is_mapped(s);
  if (C10_UNLIKELY(mapped) && !may_begin_range_locked(s)) return nullptr;
  grows_in_pool(s);
  at::DataPtr& p = pointer_of(s);
  Cell* c = cell_memory().make_locked();
  c->state.store(pins);
  c->nbytes = s->nbytes();
  c->serial = next_serial++;
  c->pool = budget.pool;
  c->small = c->nbytes < budget.options.small_bytes;
  c->outside = !c->small && p.get_deleter() != c->pool->deleter();
  c->storage = WeakStorage::reclaim_copy(s);
  c->version = version_memory().make_locked();
  c->version->cell = c;
  c->version->nbytes = c->nbytes;
  c->last_touch.store(touched_ticks, std::memory_order_relaxed);
  // The context changes hands in place: whoever reads the pointer meanwhile finds it as it was.
  auto&& context = p.move_context();
  const auto deleter = context.get_deleter();
  c->bytes = at::DataPtr(p.get(), context.release(), deleter, p.device());
  if (C10_UNLIKELY(mapped))
    begin_range_locked(c);
  else
    c->lead = static_cast<uint8_t>(lead_of(c->bytes));
  note_home(c);
  name_adopted_locked(c, s);
  context = std::unique_ptr<void, c10::DeleterFnPtr>(c, &memmgr_pager_end_of_storage);
  register_locked(c);
  count_root_locked(c);
  watch_writes(c);
  if (!c->small) resident_cell_bytes += c->nbytes;
  if (C10_UNLIKELY(mapped) && pins == 0 && begins_away_locked(c)) {
    c->state.store(kAbsent);
    c->absence = Absence::kOffloaded;
    c->outside = false;
    go_away_locked(c, s);
    return c;
  }
  if (c->outside) {
    mm_arena_add_outside(c->pool->arena, static_cast<int64_t>(c->nbytes));
    counters.adopted++;
    counters.adopted_bytes += c->nbytes;
  }
  return c;
}

void forget_bytes_locked(Cell* c, Trash* trash) {
  const bool absent = c->state.load() & kAbsent;
  if (absent) {
    end_bits_locked(c);
    mm_arena_note_virtual(c->pool->arena, -static_cast<int64_t>(c->nbytes));
    absent_cells--;
  } else {
    if (!c->small) resident_cell_bytes -= c->nbytes;
    if (c->outside) mm_arena_add_outside(c->pool->arena, -static_cast<int64_t>(c->nbytes));
  }
  if (C10_UNLIKELY(c->range != nullptr)) {
    c->range->clean = has_file_copy(c) && in_mapping(c);
    if (in_mapping(c)) c->range->home = std::move(c->bytes);
    trash->ranges.push_back(end_range_locked(c));
  }
  trash->bytes.push_back(std::move(c->bytes));
  c->bytes.clear();
  cancel_write_locked(c, trash);
  if (c->slot >= 0) trash->slots.push_back(c->slot);
  c->slot = -1;
  if (c->kept) recipe_bytes -= c->nbytes;
}

bool room_for_kept(uint64_t nbytes) { return recipe_bytes.load() + nbytes < recipe_bytes_limit(); }

void keep(Cell* c) {
  c->kept = true;
  recipe_bytes += c->nbytes;
}

bool pulls_locked(const Version* v) { return !has_bytes_locked(v) && (v->needed > 0 || v->evicted); }

// Newborns, of all and by the thread that made them: another may write to them, or end them. Threads whose numbers are
// this far apart share a count, and do not wait for each other.
constexpr uint16_t kMakers = 4096;
static std::atomic<int64_t> newborns{0}, newborns_by[kMakers];

static uint16_t maker() {
  static std::atomic<uint16_t> last{0};
  static thread_local const uint16_t number = last++ % kMakers;
  return number;
}

static void forget_newborn_locked(Cell* c) {
  if (!c->newborn) return;
  c->newborn = false;
  newborn_bytes -= c->nbytes;
  newborns--;
  newborns_by[c->maker]--;
  count_held_locked(c);
}

static void unstand_all_locked(Cell* c) {
  if (c->escape != Escape::kNone) escaped_bytes -= c->nbytes;
  c->escape = Escape::kNone;
  count_held_locked(c);
  forget_newborn_locked(c);
  c->standing_pins = 0;
}

void unadopt(Cell* c) {
  Trash trash;
  WeakStorage weak{StoragePtr()};
  StoragePtr s = c->storage.lock();
  if (!s) return;
  std::lock_guard<std::mutex> lock(graph_lock());
  if (cell_of(s.get()) != c || !c->bytes.get()) return;
  if ((c->state.load() & kPinMask) > c->standing_pins) return;  // somebody's pin outlives the budget: so does the cell
  if (!c->small) resident_cell_bytes -= c->nbytes;
  if (c->outside) mm_arena_add_outside(c->pool->arena, -static_cast<int64_t>(c->nbytes));
  unstand_all_locked(c);
  unwatch_writes(s.get());
  at::DataPtr& p = pointer_of(s.get());
  const auto deleter = c->bytes.get_deleter();
  auto&& context = p.move_context();
  context.release();
  context = std::unique_ptr<void, c10::DeleterFnPtr>(c->bytes.release_context(), deleter);
  name_unadopted_locked(c, s.get());
  if (c->range) trash.ranges.push_back(end_range_locked(c));
  cancel_write_locked(c, &trash);
  if (c->slot >= 0) trash.slots.push_back(c->slot);
  unregister_locked(c);
  c->version->cell = nullptr;
  forget_recipe_locked(c->version, &trash);
  release_version_locked(c->version, &trash);
  weak = std::move(c->storage);
  cell_memory().end_locked(c);
}

// What ends with a cell, outside of the lock.
struct Remains {
  Trash trash;
  WeakStorage storage{StoragePtr()};
};

// Ends the cell if nobody needs its bytes, or makes an orphan of it.
static void last_user_is_gone_locked(Cell* c, Remains* remains) {
  Trash& trash = remains->trash;
  remains->storage = std::move(c->storage);
  c->storage = WeakStorage(StoragePtr());
  Version* v = c->version;
  if (v) {
    const bool remade = v->recipe && recipe_available_locked(v->recipe);
    // A small root that recipes name is kept by value, within bounds.
    const bool kept = c->small && v->refs > 1 && !v->recipe && !v->uninitialized && room_for_kept(c->nbytes);
    if (has_bytes_locked(v) && ((v->needed > 0 && !remade) || kept)) {
      c->state.fetch_and(~kDead);
      v->refs--;  // the version owns the cell now
      if (c->small) keep(c);
      return;
    }
    const bool before = pulls_locked(v);
    v->cell = nullptr;
    v->evicted = false;
    const bool after = pulls_locked(v);  // needed and without bytes: it is made from what its recipe reads
    if (v->recipe && after != before) {
      if (after)
        need_inputs_locked(v->recipe);
      else
        unneed_inputs_locked(v->recipe, &trash);
    }
    check_lost_locked(v);
  }
  unregister_locked(c);
  forget_bytes_locked(c, &trash);
  if (v) release_version_locked(v, &trash);
  cell_memory().end_locked(c);
}

void last_user_is_gone(Cell* c) {
  Remains remains;
  std::lock_guard<std::mutex> lock(graph_lock());
  last_user_is_gone_locked(c, &remains);
}

extern "C" void memmgr_pager_end_of_storage(void* cell) {
  auto* c = static_cast<Cell*>(cell);
  Remains remains;
  std::lock_guard<std::mutex> lock(graph_lock());
  note_death_locked(c);
  end_name_locked(c);
  if (c->version) note_ghost_locked(c->version, c);
  const uint32_t standing = c->standing_pins;
  unstand_all_locked(c);
  note_used(c);
  const uint32_t before = c->state.fetch_add(kDead - standing, std::memory_order_acq_rel);
  if ((before & kPinMask) == standing && !(before & kBusy)) last_user_is_gone_locked(c, &remains);
}

// ---- pins ----

const uint64_t* const device_clock = mm_device_clock();

bool pin_living_locked(Cell* c, uint64_t now) {
  uint32_t state = c->state.load(std::memory_order_acquire);
  do {
    if ((state & kDead) && !(state & kPinMask)) return false;  // else the last pin ends it, ours perhaps
  } while (!c->state.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel));
  c->last_touch.store(now, std::memory_order_relaxed);
  return true;
}

bool end_move_locked(Cell* c, bool absent) {
  note_used(c);
  uint32_t now = c->state.load();
  while (!c->state.compare_exchange_weak(now, (now & ~(kBusy | kAbsent)) | (absent ? kAbsent : 0u),
                                         std::memory_order_acq_rel)) {
  }
  residency_changed().notify_all();
  return (now & kDead) && (now & kPinMask) == 0;
}

// They are malloc's, so the arena is told; paged memory like any other, since a cell that is packed can come back.
void count_bits_locked(Cell* c, uint64_t nbytes) {
  c->bits_bytes = nbytes;
  resident_cell_bytes += nbytes;
  mm_arena_note_virtual(c->pool->arena, -static_cast<int64_t>(nbytes));
  mm_arena_add_outside(c->pool->arena, static_cast<int64_t>(nbytes));
}

void end_bits_locked(Cell* c) {
  if (!c->bits_bytes) return;
  mm_bits_free(&c->bits);
  resident_cell_bytes -= c->bits_bytes;
  mm_arena_add_outside(c->pool->arena, -static_cast<int64_t>(c->bits_bytes));
  mm_arena_note_virtual(c->pool->arena, static_cast<int64_t>(c->bits_bytes));
  c->bits_bytes = 0;
}

bool come_back_locked(Cell* c, at::DataPtr bytes, mm_stream filled_on, Trash* trash) {
  end_bits_locked(c);
  if (auto* s = static_cast<c10::StorageImpl*>(c->storage._unsafe_get_target())) show_bytes(s, bytes.get(), c);
  c->bytes = std::move(bytes);
  note_home(c);
  c->filled_on.store(filled_on, std::memory_order_release);
  c->waited_for_filling.store(kNotFilled, std::memory_order_relaxed);
  resident_cell_bytes += c->nbytes;
  mm_arena_note_virtual(c->pool->arena, -static_cast<int64_t>(c->nbytes));
  absent_cells--;
  if (c->version) set_evicted_locked(c->version, false, trash);
  c->absence = Absence::kNone;
  c->checksum = Checksum();
  return end_move_locked(c, false);
}

at::DataPtr go_away_locked(Cell* c, c10::StorageImpl* s) {
  if (s) {
    name_leaving_locked(c);
    show_bytes(s, nullptr, c);
  }
  at::DataPtr bytes;
  if (C10_UNLIKELY(in_mapping(c)))
    c->range->home = std::move(c->bytes);
  else
    bytes = std::move(c->bytes);
  c->bytes.clear();
  resident_cell_bytes -= c->nbytes;
  if (c->outside) mm_arena_add_outside(c->pool->arena, -static_cast<int64_t>(c->nbytes));
  c->outside = false;
  mm_arena_note_virtual(c->pool->arena, static_cast<int64_t>(c->nbytes));
  absent_cells++;
  return bytes;
}

static at::DataPtr behind(at::DataPtr block, uint8_t lead) {
  if (C10_LIKELY(lead == 0) || !block.get()) return block;
  char* const bytes = static_cast<char*>(block.get()) + lead;
  const auto deleter = block.get_deleter();
  const c10::Device where = block.device();
  return {bytes, block.release_context(), deleter, where};
}

at::DataPtr allocate_for(const Cell* c) { return behind(c->pool->allocate(c->nbytes + c->lead), c->lead); }

at::DataPtr try_allocate_for(const Cell* c, uint64_t keep_free) {
  return behind(c->pool->try_allocate(c->nbytes + c->lead, keep_free), c->lead);
}

void end_move(Cell* c, bool absent) {
  bool last;
  {
    std::lock_guard<std::mutex> lock(graph_lock());
    last = end_move_locked(c, absent);
  }
  if (last) last_user_is_gone(c);
}

void stand_pinned_locked(Cell* c) {
  c->standing_pins++;
  c->state.fetch_add(1, std::memory_order_acq_rel);
}

void stand_unpinned_locked(Cell* c) {
  c->standing_pins--;
  note_used(c);
  c->state.fetch_sub(1, std::memory_order_acq_rel);  // its storage lives, so this is not the last user
}

void count_held_locked(Cell* c) {
  const bool elsewhere = c->newborn || c->escape != Escape::kNone || (c->root && !may_be_offloaded());
  const bool counts = c->held > 0 && !c->small && !elsewhere;
  if (counts == c->counted_as_held) return;
  c->counted_as_held = counts;
  if (counts)
    held_bytes += c->nbytes;
  else
    held_bytes -= c->nbytes;
}

void begin_held_locked(Cell* c) {
  c->held++;
  count_held_locked(c);
}

void end_held_locked(Cell* c) {
  c->held--;
  count_held_locked(c);
}

void begin_newborn_locked(Cell* c) {
  c->version->uninitialized = true;
  c->newborn = true;
  newborn_bytes += c->nbytes;
  c->maker = maker();
  stand_pinned_locked(c);
  newborns++;
  newborns_by[c->maker]++;
  count_held_locked(c);
}

void end_newborn_locked(Cell* c) {
  forget_newborn_locked(c);
  stand_unpinned_locked(c);
}

bool others_have_newborns() {
  const int64_t all = newborns.load(std::memory_order_relaxed);
  return all > 0 && all > newborns_by[maker()].load(std::memory_order_relaxed);
}

}  // namespace memmgr::pager
