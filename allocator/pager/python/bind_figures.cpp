#include "python/bind_figures.h"

// Figures, and functions for tests.
#include <algorithm>
#include <optional>
#include <string>

#include "base/deferred_drop.h"
#include "base/gil.h"
#include "base/kernel_slots.h"
#include "base/lock.h"
#include "base/refusal.h"
#include "base/tensors.h"
#include "cells/cell.h"
#include "cells/check_graph.h"
#include "cells/fixed_memory.h"
#include "cells/mapped_range.h"
#include "cells/types.h"
#include "concurrency/deferred_steps.h"
#include "dispatch/the_session.h"
#include "guards/collective_pins.h"
#include "pools/pool.h"
#include "pools/stream_rules.h"
#include "python/bind.h"
#include "recipes/op_signature.h"
#include "residency/evict.h"
#include "residency/floor.h"
#include "residency/transfer.h"
#include "residency/victims.h"

namespace memmgr::pager {

// A description of a cell, taken under the lock. Python objects are made after the lock is released: making one may
// collect garbage and so end a storage, which takes the lock.
struct CellInfo {
  uint64_t nbytes;
  std::string residency;
  std::string evicted_for;
  uint32_t pins, depth, needed, holders, evicted_in_pass;
  bool escaped, recipe, trusted, clean, small, orphan;
  std::string op;

  explicit CellInfo(Cell* c) {
    const uint32_t state = c->state.load();
    const Version* v = c->version;
    nbytes = c->nbytes;
    residency = word_of(state & kAbsent ? c->absence : Absence::kNone);
    pins = state & kPinMask;
    depth = v ? v->depth : 0;
    needed = v ? v->needed : 0;
    holders = c->storage.use_count();
    evicted_for = word_of(c->evicted_for);
    evicted_in_pass = c->evicted_in_pass;
    escaped = c->escape != Escape::kNone;
    recipe = v && v->recipe;
    trusted = recipe && v->recipe->kind->trusted();
    if (recipe) op = v->recipe->info->kernel.empty() ? v->recipe->info->called.name : v->recipe->info->kernel;
    clean = c->slot >= 0;
    small = c->small;
    orphan = !c->storage._unsafe_get_target();
  }
};

FIELDS(CellInfo,
       "One cell. `residency`: a word of Absence. `trusted`: the recipe may run again. `op`: the recipe's op. "
       "`evicted_for`: a word of EvictedFor, the cause of its last eviction. `evicted_in_pass`: so many backwards had "
       "ended "
       "by then.",
       nbytes, residency, pins, escaped, recipe, trusted, op, depth, clean, needed, holders, small, orphan, evicted_for,
       evicted_in_pass)

FIELDS(
    FailedOp,
    "The op that found no room. `name`: empty if the request came from no op. `need_bytes`: what it reads and makes, "
    "or its request alone, and what stays. `read_bytes`: of its arguments. `result_bytes`: of its largest result.",
    name, need_bytes, read_bytes, result_bytes)

namespace {

uint64_t py_take_away(Addressed o, int turn) {
  const StoragePtr s = storage_of(o.object);
  Cell* c = s ? cell_of(s.get()) : nullptr;
  if (!c) return 0;
  const WithoutGil released;
  return evict(c, EvictedFor::kByName, turn < 0 ? Way::kCheaper : turn % 2 ? Way::kOffload : Way::kEvict);
}

std::optional<CellInfo> py_describe(Addressed o) {
  const StoragePtr s = storage_of(o.object);
  std::optional<CellInfo> info;
  const Hold lock(graph_lock());
  if (Cell* c = s ? cell_of(s.get()) : nullptr) info.emplace(c);
  return info;
}

std::vector<CellInfo> py_cells() {
  std::vector<CellInfo> all;
  const Hold lock(graph_lock());
  for_each_cell_locked([&](Cell* c) REQUIRES(graph_lock()) { all.emplace_back(c); });
  return all;
}

// Tensors without a cell, or with a small one, are left out.
void py_set_purpose(TensorList tensors, Purpose purpose) {
  std::vector<StoragePtr> storages;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors.object); ++i)
    storages.push_back(storage_of(PyList_GET_ITEM(tensors.object, i)));
  const Hold lock(graph_lock());
  for (const StoragePtr& s : storages)
    if (Cell* c = s ? cell_of(s.get()) : nullptr; c && !c->small && c->purpose == Purpose::kOther)
      c->purpose = purpose;  // set once, so that no sum by purpose falls
}

Figures py_stats() {
  Figures d;
  mm_arena_stats a{};  // zeros before the first budget of a process: a failed opening calls this, too
  if (the_session.arena) mm_arena_stats_get(the_session.arena, &a);
  d.put("budget_bytes", a.budget_bytes);
  d.put("resident_bytes.current", a.live_bytes + a.outside_bytes);
  d.put("resident_bytes.peak", a.resident_peak_bytes);
  d.put("unmanaged_peak_bytes", a.unmanaged_peak_bytes);
  d.put("floor_bytes", floor_bytes());
  d.put("untried_bytes", untried_bytes());
  d.put("reclaims", a.reclaims);
  d.put("remapped_bytes", a.remapped_bytes);
  d.put("resident_cell_bytes", totals.resident_cell_bytes.load());
  d.put("escaped_bytes", totals.escaped_bytes.load());
  d.put("mapped_bytes", mapped_bytes());
  const FixedBytes fixed = fixed_bytes();
  d.put("fixed_bytes.library", fixed.of[static_cast<size_t>(Owner::kLibrary)]);
  d.put("fixed_bytes.shared", fixed.of[static_cast<size_t>(Owner::kShared)]);
  d.put("fixed_bytes.mapped_file", fixed.of[static_cast<size_t>(Owner::kMappedFile)]);
  d.put("absent_cells", static_cast<uint64_t>(totals.absent_cells.load()));
  d.put("recipe_bytes", totals.recipe_bytes.load());
  d.put("works_in_flight", works_in_flight());
#define COUNTER(name) d.put(#name, the_session.counters.name.load());
  COUNTER(evictions)
  COUNTER(evicted_bytes)
  COUNTER(offloads)
  COUNTER(packed)
  COUNTER(offload_bytes)
  COUNTER(clean_drops)
  COUNTER(reloads)
  COUNTER(reload_bytes)
  COUNTER(rematerialized_ops)
  COUNTER(rematerializations)
  d.put("ops", ops_counted() - the_session.counters.ops_before);
  COUNTER(recorded_ops)
  COUNTER(adopted_bytes)
  COUNTER(escapes)
  COUNTER(trials)
  COUNTER(refused_kinds)
  COUNTER(tier_errors)
  COUNTER(copies_before_write)
  COUNTER(trap_retries)
  COUNTER(retries)
  COUNTER(foreign_writes)
  COUNTER(unseen_ops)
  COUNTER(cut_recipes)
  COUNTER(reads_ahead)
  COUNTER(writes_ahead)
  COUNTER(late_reads)
  COUNTER(planned_periods)
  COUNTER(left_periods)
  COUNTER(loop_turns)
  COUNTER(short_periods)
  COUNTER(slices)
  COUNTER(pending_slices)
  COUNTER(remat_ns)
  COUNTER(stall_ns)
  COUNTER(room_ns)
  COUNTER(own_ns)
#undef COUNTER
  uint64_t cells, pinned = 0, evicted = 0, offloaded = 0, largest = 0;
  struct {
    uint64_t resident = 0, below = 0, moved = 0;
  } of[kPurposes];
  struct {
    uint64_t cells = 0, bytes = 0;
    Escape latest = Escape::kNone;
  } exported;
  {
    const Hold lock(graph_lock());
    cells = count_cells_locked();
    for (size_t purpose = 0; purpose < kPurposes; ++purpose) of[purpose].moved = totals.moved_by_ended[purpose];
    for_each_cell_locked([&](Cell* c) REQUIRES(graph_lock()) {
      pinned += !c->small && (c->state.load() & kPinMask) ? 1 : 0;
      if (!c->small && c->escape != Escape::kNone && c->purpose == Purpose::kOther) {
        exported.cells++;
        exported.bytes += c->nbytes;
        exported.latest = c->escape;
      }
      largest = std::max(largest, c->nbytes);
      auto& its = of[static_cast<size_t>(c->purpose)];
      its.moved += c->moved_bytes;
      if (!(c->state.load() & kAbsent)) {
        its.resident += c->nbytes;
      } else if (c->absence == Absence::kOffloaded) {
        offloaded += c->nbytes;
        its.below += c->nbytes;
      } else {  // packed ones need no tier either
        evicted += c->nbytes;
      }
    });
  }
  for (size_t purpose = 1; purpose < kPurposes; ++purpose) {  // the rest is kOther
    const std::string name = Words<Purpose>::all[purpose];
    d.put(("resident_bytes." + name).c_str(), of[purpose].resident);
    d.put(("offloaded_bytes." + name).c_str(), of[purpose].below);
    d.put(("moved_bytes." + name).c_str(), of[purpose].moved);
  }
  d.put("cells", cells);
  d.put("pinned_cells", pinned);
  d.put("exported_cells", exported.cells);
  d.put("exported_bytes", exported.bytes);
  d.put("exported_why", static_cast<uint64_t>(exported.latest));
  d.put("evicted_now_bytes", evicted);
  d.put("offloaded_now_bytes", offloaded);
  d.put("largest_cell_bytes", largest);
  return d;
}

void py_drain() {
  {
    const WithoutGil released;
    drop_what_waits();
    poll_transfers(the_session);
  }
  poll_works();
}

// Empty on the CPU.
Figures py_device_stats() {
  Figures d;
  mm_device* device = the_session.pool ? the_session.pool->queue() : nullptr;
  if (!device) return d;
  mm_device_stats s{};
  mm_device_stats_get(device, &s);
  d.put("waits", s.waits);
  d.put("cross_reuses", s.cross_reuses);
  d.put("synchronizations", s.synchronizations);
  d.put("maps", s.maps);
  d.put("unmaps", s.unmaps);
  d.put("map_nanoseconds", s.map_nanoseconds);
  d.put("unmap_nanoseconds", s.unmap_nanoseconds);
  d.put("driver_errors", s.driver_errors);
  return d;
}

bool py_read_ahead(Addressed o) {
  const StoragePtr s = storage_of(o.object);
  Cell* c = s ? cell_of(s.get()) : nullptr;
  return c && begin_read(c);
}

void py_check_arena() {
  char why[400] = {};
  if (the_session.arena && mm_arena_check(the_session.arena, why, sizeof why) != 0)
    raise_error(PyExc_RuntimeError, "%s", why);
}

void py_miscount(int64_t bytes) {
  const Hold lock(graph_lock());
  totals.long_pinned_bytes += static_cast<uint64_t>(bytes);
}

}  // namespace

void bind_figures(Module& m) {
  m.def<&broken_equation>("check_graph", "",
                          "The equation of cells/check_graph.h that does not hold, or an empty text.");
  m.def<&py_miscount>("miscount", "nbytes", "Makes long_pinned_bytes wrong, for the test that such a fault is found.");
  m.def<&set_graph_checks>("set_graph_checks", "share",
                           "Checks the graph after ops, in this share of the time. From the first call on, ranks of "
                           "locks are checked, too.");
  m.def<&py_take_away>("take_away", "tensor, turn=-1",
                       "Evicts a cell: the cheaper way, offloaded at an odd turn, or evicted at an even one. The "
                       "result is its bytes.");
  m.def<&py_read_ahead>("read_ahead", "tensor", "True: the read has begun, or none is needed. For tests.");
  m.def<&py_describe>("describe", "tensor", "The tensor's cell; None: it has none.");
  m.def<&py_cells>("cells", "", "All cells.");
  m.def<&py_set_purpose>("set_purpose", "tensors, purpose", "What the program has these tensors for.");
  m.def<&py_stats>("stats", "", "Figures.");
  m.def<&py_device_stats>("device_stats", "", "Figures of the device's memory; empty on the CPU.");
  m.def<&note_refused>("note_refused", "", "The request of this thread that found no room is part of the floor.");
  m.def<&refusal>("refusal", "",
                  "The allocator's text of the request of this thread that found no room; empty once it was read.");
  m.def<&take_failed_op>("failed_op", "", "The op of this thread that found no room, once.");
  m.def<&py_drain>("drain", "", "Drops references that wait, and ends works and transfers that are done.");
  m.def<&leave_out>("leave_out", "rules", "Stream rules (a mask) that are not kept. For tests.");
  m.def<&py_check_arena>("check", "", "Raises an error if an invariant of the arena is broken.");
}

}  // namespace memmgr::pager
