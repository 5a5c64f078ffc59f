#include "python/bind_figures.h"

// Figures, and functions for tests.
#include <algorithm>
#include <optional>
#include <string>

#include "base/budget.h"
#include "base/deferred_drop.h"
#include "base/errors.h"
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
#include "guards/collective_pins.h"
#include "pools/pool.h"
#include "pools/stream_rules.h"
#include "recipes/op_signature.h"
#include "residency/evict.h"
#include "residency/floor.h"
#include "residency/transfer.h"
#include "residency/victims.h"

namespace memmgr::pager {

namespace {

// take_away(tensor, turn) -> the bytes evicted; for tests
PyObject* py_take_away(PyObject*, PyObject* args) {
  PyObject* o;
  int turn = -1;
  if (!PyArg_ParseTuple(args, "O|i", &o, &turn)) return nullptr;
  return guarded([&]() -> PyObject* {
    StoragePtr s = storage_of(o);
    Cell* c = s ? cell_of(s.get()) : nullptr;
    uint64_t n = 0;
    if (c) {
      Py_BEGIN_ALLOW_THREADS;
      n = let_go(c, turn < 0 ? Way::kCheaper : turn % 2 ? Way::kOffload : Way::kEvict);
      Py_END_ALLOW_THREADS;
    }
    return PyLong_FromUnsignedLongLong(n);
  });
}

// A description of a cell, taken under the lock. Python objects are made after the lock is released: making one may
// collect garbage and so end a storage, which takes the lock.
struct CellRow {
  unsigned long long nbytes;
  const char* residency;
  unsigned pins, depth, needed, holders;
  bool escaped, recipe, trusted, clean, small, orphan;
  std::string op;

  explicit CellRow(Cell* c) {
    static const char* names[] = {"resident", "offloaded", "evicted", "packed"};
    const uint32_t state = c->state.load();
    const Version* v = c->version;
    nbytes = c->nbytes;
    residency = state & kAbsent ? names[static_cast<int>(c->absence)] : "resident";
    pins = state & kPinMask;
    depth = v ? v->depth : 0;
    needed = v ? v->needed : 0;
    holders = c->storage.use_count();
    escaped = c->escape != Escape::kNone;
    recipe = v && v->recipe;
    trusted = recipe && v->recipe->kind->trusted();
    if (recipe) op = v->recipe->info->op.operator_name().name;
    clean = c->slot >= 0;
    small = c->small;
    orphan = !c->storage._unsafe_get_target();
  }

  PyObject* object() const {
    const auto flag = [](bool on) { return on ? Py_True : Py_False; };
    return Py_BuildValue("{sK ss sI sO sO sO ss sI sO sI sI sO sO}", "nbytes", nbytes, "residency", residency, "pins",
                         pins, "escaped", flag(escaped), "recipe", flag(recipe), "trusted", flag(trusted), "op",
                         op.c_str(), "depth", depth, "clean", flag(clean), "needed", needed, "holders", holders,
                         "small", flag(small), "orphan", flag(orphan));
  }
};

// describe(tensor) -> dict or None
PyObject* py_describe(PyObject*, PyObject* o) {
  const StoragePtr s = storage_of(o);
  std::optional<CellRow> row;
  {
    const Hold lock(graph_lock());
    if (Cell* c = s ? cell_of(s.get()) : nullptr) row.emplace(c);
  }
  if (!row) Py_RETURN_NONE;
  return row->object();
}

// cells() -> [dict], one for each cell
PyObject* py_cells(PyObject*, PyObject*) {
  std::vector<CellRow> rows;
  {
    const Hold lock(graph_lock());
    for_each_cell_locked([&](Cell* c) { rows.emplace_back(c); });
  }
  PyObject* list = PyList_New(0);
  for (const CellRow& r : rows) {
    PyObject* row = list ? r.object() : nullptr;
    if (row) PyList_Append(list, row);
    Py_XDECREF(row);
  }
  return list;
}

void put(PyObject* dict, const char* key, uint64_t value) {
  PyObject* v = PyLong_FromUnsignedLongLong(value);
  if (v) PyDict_SetItemString(dict, key, v);
  Py_XDECREF(v);
}

// set_purpose(tensors, purpose): the program's use of the tensors (Purpose in cells/types.h). Tensors without a cell,
// or with a small one, are left out.
PyObject* py_set_purpose(PyObject*, PyObject* args) {
  PyObject* tensors;
  int purpose;
  if (!PyArg_ParseTuple(args, "O!i", &PyList_Type, &tensors, &purpose)) return nullptr;
  if (purpose < 0 || purpose >= static_cast<int>(kPurposes))
    return PyErr_Format(PyExc_ValueError, "no purpose %d", purpose);
  std::vector<StoragePtr> storages;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) storages.push_back(storage_of(PyList_GET_ITEM(tensors, i)));
  {
    const Hold lock(graph_lock());
    for (const StoragePtr& s : storages)
      if (Cell* c = s ? cell_of(s.get()) : nullptr; c && !c->small && c->purpose == Purpose::kOther)
        c->purpose = static_cast<Purpose>(purpose);  // set once, so that no sum by purpose falls
  }
  Py_RETURN_NONE;
}

PyObject* py_stats(PyObject*, PyObject*) {
  PyObject* d = PyDict_New();
  if (!d) return d;
  mm_arena_stats a{};  // zeros before the first budget of a process: a failed opening calls this, too
  if (budget.arena) mm_arena_stats_get(budget.arena, &a);
  put(d, "budget_bytes", a.budget_bytes);
  put(d, "resident_bytes.current", a.live_bytes + a.outside_bytes);
  put(d, "resident_bytes.peak", a.resident_peak_bytes);
  put(d, "unmanaged_peak_bytes", a.unmanaged_peak_bytes);
  put(d, "floor_bytes", floor_bytes());
  put(d, "untried_bytes", untried_bytes());
  put(d, "reclaims", a.reclaims);
  put(d, "remapped_bytes", a.remapped_bytes);
  put(d, "resident_cell_bytes", resident_cell_bytes.load());
  put(d, "escaped_bytes", escaped_bytes.load());
  put(d, "mapped_bytes", mapped_bytes());
  const FixedBytes fixed = fixed_bytes();
  put(d, "fixed_bytes.library", fixed.of[static_cast<size_t>(Owner::kLibrary)]);
  put(d, "fixed_bytes.shared", fixed.of[static_cast<size_t>(Owner::kShared)]);
  put(d, "fixed_bytes.mapped_file", fixed.of[static_cast<size_t>(Owner::kMappedFile)]);
  put(d, "absent_cells", static_cast<uint64_t>(absent_cells.load()));
  put(d, "recipe_bytes", recipe_bytes.load());
  put(d, "works_in_flight", works_in_flight());
#define COUNTER(name) put(d, #name, counters.name.load());
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
  put(d, "ops", ops_counted() - counters.ops_before);
  COUNTER(recorded_ops)
  COUNTER(adopted)
  COUNTER(adopted_bytes)
  COUNTER(escapes)
  COUNTER(trials)
  COUNTER(refused_kinds)
  COUNTER(tier_errors)
  COUNTER(copies_before_write)
  COUNTER(trap_retries)
  COUNTER(admission_waits)
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
  uint64_t cells, pinned = 0, orphans = 0, evicted = 0, offloaded = 0, largest = 0;
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
    for (size_t purpose = 0; purpose < kPurposes; ++purpose) of[purpose].moved = moved_by_ended[purpose];
    for_each_cell_locked([&](Cell* c) {
      pinned += !c->small && (c->state.load() & kPinMask) ? 1 : 0;
      if (!c->small && c->escape != Escape::kNone && c->purpose == Purpose::kOther) {
        exported.cells++;
        exported.bytes += c->nbytes;
        exported.latest = c->escape;
      }
      orphans += c->storage._unsafe_get_target() ? 0 : 1;
      largest = std::max(largest, c->nbytes);
      auto& its = of[static_cast<size_t>(c->purpose)];
      its.moved += c->moved_bytes;
      if (!(c->state.load() & kAbsent)) {
        its.resident += c->nbytes;
      } else if (c->absence == Absence::kEvicted) {
        evicted += c->nbytes;
      } else {
        offloaded += c->nbytes;
        its.below += c->nbytes;
      }
    });
  }
  static const char* names[kPurposes] = {"other", "parameters", "gradients", "optimizer_states"};
  for (size_t purpose = 1; purpose < kPurposes; ++purpose) {  // the rest is kOther
    const std::string name = names[purpose];
    put(d, ("resident_bytes." + name).c_str(), of[purpose].resident);
    put(d, ("below_bytes." + name).c_str(), of[purpose].below);
    put(d, ("moved_bytes." + name).c_str(), of[purpose].moved);
  }
  put(d, "cells", cells);
  put(d, "pinned_cells", pinned);
  put(d, "exported_cells", exported.cells);
  put(d, "exported_bytes", exported.bytes);
  put(d, "exported_why", static_cast<uint64_t>(exported.latest));
  put(d, "orphans", orphans);
  put(d, "evicted_now_bytes", evicted);
  put(d, "offloaded_now_bytes", offloaded);
  put(d, "largest_cell_bytes", largest);
  return d;
}

PyObject* py_note_refused(PyObject*, PyObject*) {
  note_refused();
  Py_RETURN_NONE;
}

PyObject* py_refusal(PyObject*, PyObject*) { return PyUnicode_FromString(refusal().c_str()); }

// take_failed_op() -> (name, bytes of its need, of its arguments, of its largest result)
PyObject* py_failed_op(PyObject*, PyObject*) {
  const FailedOp failed = take_failed_op();
  const auto number = [](uint64_t bytes) { return static_cast<unsigned long long>(bytes); };
  return Py_BuildValue("sKKK", failed.name.c_str(), number(failed.need_bytes), number(failed.read_bytes),
                       number(failed.result_bytes));
}

PyObject* py_drain(PyObject*, PyObject*) {
  Py_BEGIN_ALLOW_THREADS;
  drop_what_waits();
  poll_transfers();
  Py_END_ALLOW_THREADS;
  poll_works();
  Py_RETURN_NONE;
}

PyObject* py_leave_out(PyObject*, PyObject* o) {
  const unsigned long rules = PyLong_AsUnsignedLong(o);
  if (PyErr_Occurred()) return nullptr;
  leave_out(static_cast<uint32_t>(rules));
  Py_RETURN_NONE;
}

PyObject* py_device_stats(PyObject*, PyObject*) {
  PyObject* d = PyDict_New();
  mm_device* device = d && budget.pool ? budget.pool->queue() : nullptr;
  if (!device) return d;
  mm_device_stats s{};
  mm_device_stats_get(device, &s);
  put(d, "waits", s.waits);
  put(d, "cross_reuses", s.cross_reuses);
  put(d, "synchronizations", s.synchronizations);
  put(d, "maps", s.maps);
  put(d, "unmaps", s.unmaps);
  put(d, "map_nanoseconds", s.map_nanoseconds);
  put(d, "unmap_nanoseconds", s.unmap_nanoseconds);
  put(d, "driver_errors", s.driver_errors);
  return d;
}

// read_ahead(tensor or cdata) -> True if the read has begun or none is needed; for tests
PyObject* py_read_ahead(PyObject*, PyObject* o) {
  return guarded([&]() -> PyObject* {
    const StoragePtr s = storage_of(o);
    Cell* c = s ? cell_of(s.get()) : nullptr;
    return PyBool_FromLong(c && begin_read(c));
  });
}

PyObject* py_check_arena(PyObject*, PyObject*) {
  char why[400] = {};
  if (budget.arena && mm_arena_check(budget.arena, why, sizeof why) != 0)
    return PyErr_Format(PyExc_RuntimeError, "%s", why);
  Py_RETURN_NONE;
}

// check_graph() -> the equation of cells/check_graph.h that does not hold, "": all hold
PyObject* py_check_graph(PyObject*, PyObject*) { return PyUnicode_FromString(broken_equation().c_str()); }

// miscount(bytes): held_bytes is wrong by so much, for the test that such a fault is found
PyObject* py_miscount(PyObject*, PyObject* o) {
  const long long bytes = PyLong_AsLongLong(o);
  if (PyErr_Occurred()) return nullptr;
  const Hold lock(graph_lock());
  held_bytes += static_cast<uint64_t>(bytes);
  Py_RETURN_NONE;
}

// set_graph_checks(share): after ops, in so much of the time
PyObject* py_set_graph_checks(PyObject*, PyObject* o) {
  const double share = PyFloat_AsDouble(o);
  if (PyErr_Occurred()) return nullptr;
  set_graph_checks(share);
  Py_RETURN_NONE;
}

}  // namespace

PyMethodDef figure_methods[] = {
    {"check_graph", py_check_graph, METH_NOARGS, "the equation of the graph that does not hold, or an empty text"},
    {"miscount", py_miscount, METH_O, "adds to a sum, for a test"},
    {"set_graph_checks", py_set_graph_checks, METH_O, "set_graph_checks(share of the time): checks after ops"},
    {"take_away", py_take_away, METH_VARARGS, "take_away(tensor, turn=-1) -> bytes that left; for tests"},
    {"read_ahead", py_read_ahead, METH_O, "read_ahead(tensor) -> is it on its way? for tests"},
    {"describe", py_describe, METH_O, "describe(tensor) -> what is known about its cell, or None"},
    {"cells", py_cells, METH_NOARGS, "what is known about every cell"},
    {"set_purpose", py_set_purpose, METH_VARARGS, "set_purpose(tensors, purpose): what the program has them for"},
    {"stats", py_stats, METH_NOARGS, "figures"},
    {"device_stats", py_device_stats, METH_NOARGS, "figures of the device's memory; empty on the CPU"},
    {"note_refused", py_note_refused, METH_NOARGS, "what this thread found no room for is part of the floor"},
    {"refusal", py_refusal, METH_NOARGS,
     "what this thread found no room for, as the allocator said it; empty once it was asked"},
    {"failed_op", py_failed_op, METH_NOARGS,
     "the op of this thread that found no room, once: its name (empty: no op), what it needs (0: not known), its "
     "arguments, its largest result, in bytes"},
    {"drain", py_drain, METH_NOARGS, "looks at references that wait, and at works and transfers that have ended"},
    {"leave_out", py_leave_out, METH_O, "stream rules (a mask) that are not kept; for tests"},
    {"check", py_check_arena, METH_NOARGS, "raises if an invariant of the arena is broken"},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace memmgr::pager
