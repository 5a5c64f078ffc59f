#include "cells/cell.h"

#include <algorithm>

#include "base/lock.h"
#include "base/no_destructor.h"
#include "base/thread_state.h"
#include "pools/pool.h"

namespace memmgr::pager {

Totals totals;

// Never destroyed: storages outlive statics.
struct Cells {
  Recycled<Cell> memory OF_GRAPH;
  Recycled<Version> versions OF_GRAPH;
  std::vector<Cell*> all OF_GRAPH;  // the registry
  uint64_t next_serial OF_GRAPH = 1;
  Condition changed;
};

static NoDestructor<Cells> cells;

Recycled<Cell>& cell_memory() { return cells->memory; }
Recycled<Version>& version_memory() { return cells->versions; }
Condition& residency_changed() { return cells->changed; }

size_t count_cells_locked() { return cells->all.size(); }
Cell* cell_at_locked(size_t index) { return cells->all[index]; }

// Filled before the first cell, and null behind the last one.
constexpr size_t kMostListeners = 4;
static void (*storage_died[kMostListeners + 1])(const Cell* c) = {};
static void (*cell_ended[kMostListeners + 1])(Cell* c) = {};

template <class F>
static void add_listener(F** all, F* function) {
  if (!function) return;
  size_t n = 0;
  while (all[n]) ++n;
  TORCH_INTERNAL_ASSERT(n < kMostListeners);
  all[n] = function;
}

ListensToCells::ListensToCells(CellListener listener) {
  add_listener(storage_died, listener.storage_died);
  add_listener(cell_ended, listener.ended);
}

void tell_storage_died_locked(const Cell* c) {
  for (auto* const* tell = storage_died; *tell; ++tell) (*tell)(c);
}

void (*on_end_of_storage)(Cell* c) = nullptr;
extern "C" void memmgr_pager_end_of_storage(void* cell) { on_end_of_storage(static_cast<Cell*>(cell)); }

void register_locked(Cell* c) {
  auto& all = cells->all;
  c->index = all.size();
  all.push_back(c);
}

static void set_root_locked(Cell* c, bool root) REQUIRES(graph_lock()) {
  if (c->root == root) return;
  c->root = root;
  if (root)
    totals.root_bytes += c->nbytes;
  else
    totals.root_bytes -= c->nbytes;
  count_long_pinned_locked(c);
}

void count_root_locked(Cell* c) {
  const Version* v = c->version;
  // A filled version has no recipe once it is written: a budget without a tier needs room for it then.
  const bool made_again = v && v->recipe ? !v->recipe->filled : v && v->presumed;
  set_root_locked(c, !c->small && v && !v->temporary && !made_again && !has_file_copy(c));
}

void unregister_locked(Cell* c) {
  totals.moved_by_ended[static_cast<size_t>(c->purpose)] += c->moved_bytes;
  set_root_locked(c, false);
  for (auto* const* tell = cell_ended; *tell; ++tell) (*tell)(c);
  auto& all = cells->all;
  all[c->index] = all.back();
  all[c->index]->index = c->index;
  all.pop_back();
}

void forget_moved() {
  const Hold lock(graph_lock());
  for (uint64_t& bytes : totals.moved_by_ended) bytes = 0;
  for_each_cell_locked([](Cell* c) REQUIRES(graph_lock()) { c->moved_bytes = 0; });
}

void Trash::add_slot(const Cell* c, mm_slot slot) { slots.push_back({&c->pool->session, slot}); }

void Trash::end() {
  for (const Slot& s : slots)
    if (s.session->tier) mm_tier_free(s.session->tier, s.slot);
  slots.clear();
  bytes.clear();
  ranges.clear();
}

uint64_t serial_of_next_locked() { return cells->next_serial; }
uint64_t next_serial_locked() { return cells->next_serial++; }

// A hundredth of the budget (rule 5).
uint64_t recipe_bytes_limit(const Session& session) {
  return std::max<uint64_t>(mm_arena_budget(session.arena) / 100, kLeastRecipeBytes);
}

bool room_for_kept(const Cell* c) {
  return totals.recipe_bytes.load() + c->nbytes < recipe_bytes_limit(c->pool->session);
}

void keep_locked(Cell* c) {
  c->kept = true;
  totals.recipe_bytes += c->nbytes;
}

// The number of newborns, of all threads and of the thread that made them: another thread may write to them, or end
// them. Threads whose numbers differ by a multiple of kMakers share a count, and do not wait for each other.
constexpr uint16_t kMakers = 4096;
static std::atomic<int64_t> newborns{0}, newborns_by[kMakers];

static uint16_t maker() {
  static std::atomic<uint16_t> last{0};
  static thread_local const uint16_t number = last++ % kMakers;
  return number;
}

static void forget_newborn_locked(Cell* c) REQUIRES(graph_lock()) {
  if (!c->newborn) return;
  c->newborn = false;
  totals.newborn_bytes -= c->nbytes;
  newborns--;
  newborns_by[c->maker]--;
  count_long_pinned_locked(c);
}

void unstand_all_locked(Cell* c) {
  if (c->escape != Escape::kNone) totals.escaped_bytes -= c->nbytes;
  c->escape = Escape::kNone;
  count_long_pinned_locked(c);
  forget_newborn_locked(c);
  c->standing_pins = 0;
}

// Bits are malloc's memory, so they are added to the arena's count. They count as a resident cell's bytes, since a
// packed cell can be restored.
void count_bits_locked(Cell* c, uint64_t nbytes) {
  c->bits_bytes = nbytes;
  totals.resident_cell_bytes += nbytes;
  mm_arena_note_virtual(c->pool->arena, -static_cast<int64_t>(nbytes));
  mm_arena_add_outside(c->pool->arena, static_cast<int64_t>(nbytes));
}

void end_bits_locked(Cell* c) {
  if (!c->bits_bytes) return;
  mm_bits_free(&c->bits);
  totals.resident_cell_bytes -= c->bits_bytes;
  mm_arena_add_outside(c->pool->arena, -static_cast<int64_t>(c->bits_bytes));
  mm_arena_note_virtual(c->pool->arena, static_cast<int64_t>(c->bits_bytes));
  c->bits_bytes = 0;
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

void stand_pinned_locked(Cell* c) {
  c->standing_pins++;
  c->state.fetch_add(1, std::memory_order_acq_rel);
}

void stand_unpinned_locked(Cell* c) {
  c->standing_pins--;
  note_used(c);
  c->state.fetch_sub(1, std::memory_order_acq_rel);  // its storage lives, so this is not the last user
}

void count_long_pinned_locked(Cell* c) {
  const auto elsewhere = [&] {
    return c->newborn || c->escape != Escape::kNone || (c->root && !c->pool->session.may_offload());
  };
  const bool counts = c->long_pins > 0 && !c->small && !elsewhere();
  if (counts == c->counted_as_long_pinned) return;
  c->counted_as_long_pinned = counts;
  if (counts)
    totals.long_pinned_bytes += c->nbytes;
  else
    totals.long_pinned_bytes -= c->nbytes;
}

void begin_long_pin_locked(Cell* c) {
  c->long_pins++;
  count_long_pinned_locked(c);
}

void end_long_pin_locked(Cell* c) {
  c->long_pins--;
  count_long_pinned_locked(c);
}

void begin_newborn_locked(Cell* c) {
  c->version->uninitialized = true;
  c->newborn = true;
  totals.newborn_bytes += c->nbytes;
  c->maker = maker();
  stand_pinned_locked(c);
  newborns++;
  newborns_by[c->maker]++;
  count_long_pinned_locked(c);
}

void end_newborn_locked(Cell* c) {
  forget_newborn_locked(c);
  stand_unpinned_locked(c);
}

bool is_blank(const Cell* c) { return c->blank_in && c->blank_in == tl_compiled_graph && c->version->uninitialized; }

bool others_have_newborns() {
  const int64_t all = newborns.load(std::memory_order_relaxed);
  return all > 0 && all > newborns_by[maker()].load(std::memory_order_relaxed);
}

}  // namespace memmgr::pager
