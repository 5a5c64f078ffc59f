// The Python module: opening and closing, what the readers ask for, figures. Nothing here is on the way of an op.
#include <Python.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>
#include <string>

#include "admission.h"
#include "budget.h"
#include "captures.h"
#include "cell.h"
#include "escape.h"
#include "exports.h"
#include "foreign.h"
#include "fork.h"
#include "frame.h"
#include "kernel.h"
#include "module_plans.h"
#include "module_ranking.h"
#include "observe.h"
#include "pools/pool.h"
#include "recipe.h"
#include "reclaim.h"
#include "reducer.h"
#include "threads.h"
#include "transfer.h"
#include "works.h"

namespace memmgr::pager {

uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000ull + static_cast<uint64_t>(t.tv_nsec);
}

#if defined(__x86_64__)
uint64_t ticks() { return __builtin_ia32_rdtsc(); }
#else
uint64_t ticks() { return now_ns(); }
#endif

double seconds_of_ticks(uint64_t n) {
  static const double each = [] {
    const uint64_t t0 = now_ns(), c0 = ticks();
    while (now_ns() - t0 < 2000000) {
    }
    return static_cast<double>(now_ns() - t0) * 1e-9 / static_cast<double>(ticks() - c0);
  }();
  return static_cast<double>(n) * each;
}

namespace {

PyObject* make_budget_error = nullptr;  // (text) -> the exception to raise
PyObject* recompute_error = nullptr;    // its class

void set_out_of_memory(const char* text) {
  note_refused();
  PyObject* error = make_budget_error ? PyObject_CallFunction(make_budget_error, "s", text) : nullptr;
  if (error)
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
  else if (!PyErr_Occurred())
    PyErr_SetString(PyExc_MemoryError, text);
  Py_XDECREF(error);
}

// What torch throws becomes Python's error of the same meaning.
template <class F>
PyObject* guarded(F&& body) {
  try {
    return body();
  } catch (const c10::OutOfMemoryError& e) {
    set_out_of_memory(e.what_without_backtrace());
  } catch (const WrongBytes& e) {
    PyErr_SetString(recompute_error ? recompute_error : PyExc_RuntimeError, e.what_without_backtrace());
  } catch (const c10::Error& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what_without_backtrace());
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  }
  return nullptr;
}

}  // namespace

StoragePtr storage_of(PyObject* o) {
  if (THPVariable_Check(o)) {
    const at::Tensor& t = THPVariable_Unpack(o);
    if (!t.defined() || !t.unsafeGetTensorImpl()->has_storage()) return {};
    return StoragePtr::reclaim_copy(t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  }
  if (PyLong_Check(o)) return StoragePtr::reclaim_copy(static_cast<c10::StorageImpl*>(PyLong_AsVoidPtr(o)));
  return {};
}

namespace {

PyObject* py_open(PyObject*, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"limit",       "folder",  "disk_bytes", "throttle",   "small_bytes", "may_evict",
                                "may_offload", "torture", "verify",     "order",      "search",      "remap",
                                "apart",       "device",  "driver",     "host_bytes", nullptr};
  unsigned long long limit, disk_bytes, throttle, small_bytes, host_bytes;
  const char *folder, *device, *driver;
  int may_evict, may_offload, torture, verify, order, search, remap, apart;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KzKKKppppiiipszK", const_cast<char**>(names), &limit, &folder,
                                   &disk_bytes, &throttle, &small_bytes, &may_evict, &may_offload, &torture, &verify,
                                   &order, &search, &remap, &apart, &device, &driver, &host_bytes))
    return nullptr;
  return guarded([&]() -> PyObject* {
    TORCH_CHECK(!budget.forked,
                "memmgr: this process was forked from one that has had a budget, and its memory is that one's: it can "
                "have no budget of its own. Start it with multiprocessing's \"spawn\", or fork before a budget opens.");
    TORCH_CHECK(!budget.open, "memmgr: a budget is open already");
    seconds_of_ticks(0);
    const c10::Device where{std::string(device)};
    Pool* pool = where.is_cpu() ? cpu_pool() : device_pool(where, driver);
    char why[200] = {};
    if (pool->on_host() && folder && may_offload) {
      budget.tier = mm_tier_open(folder, disk_bytes, throttle, 2, why, sizeof why);
      if (!budget.tier) return PyErr_Format(PyExc_OSError, "memmgr: cannot open a tier file in %s: %s", folder, why);
    } else if (!pool->on_host() && host_bytes && may_offload) {
      budget.tier = pool->open_host_tier(host_bytes, why, sizeof why);
      if (!budget.tier) return PyErr_Format(PyExc_OSError, "memmgr: cannot page-lock host memory: %s", why);
    }
    Options o;
    o.small_bytes = small_bytes;
    o.may_evict = may_evict;
    o.may_offload = may_offload;
    o.torture = torture;
    o.verify = verify;
    o.order = static_cast<Order>(order);
    o.search = search;
    o.remap = remap;
    o.apart = apart;
    budget.options = o;
    budget.tier_error.clear();
    budget.pool = pool;
    budget.arena = pool->arena;
    mm_arena_set_layout(budget.arena, o.remap, o.apart);
    pool->set_budget(limit);
    pool->install();
    prepare_for_waiting();
    watch_forks();  // after the core has: handlers run backwards, and ours waits for the tier
    mm_arena_reset_peak(budget.arena);
    mm_arena_reset_counts(budget.arena);
    reset_floor();
    for (auto* n : {&counters.evictions,
                    &counters.evicted_bytes,
                    &counters.offloads,
                    &counters.packed,
                    &counters.offload_bytes,
                    &counters.clean_drops,
                    &counters.reloads,
                    &counters.reload_bytes,
                    &counters.rematerialized_ops,
                    &counters.rematerializations,
                    &counters.remat_ns,
                    &counters.stall_ns,
                    &counters.reclaims,
                    &counters.ops,
                    &counters.recorded_ops,
                    &counters.adopted,
                    &counters.adopted_bytes,
                    &counters.escapes,
                    &counters.trials,
                    &counters.refused_kinds,
                    &counters.tier_errors,
                    &counters.copies_before_write,
                    &counters.trap_retries,
                    &counters.admission_waits,
                    &counters.retries,
                    &counters.foreign_writes,
                    &counters.unseen_ops,
                    &counters.cut_recipes,
                    &counters.reads_ahead,
                    &counters.writes_ahead,
                    &counters.late_reads,
                    &counters.planned_periods,
                    &counters.short_periods})
      n->store(0);
    catch_unseen_threads(true);
    watch_exports(true);
    budget.open.store(true, std::memory_order_release);
    see_this_thread(true);
    Py_RETURN_NONE;
  });
}

// Cells, and references that keep them alive while the GIL is free.
std::vector<std::pair<Cell*, StoragePtr>> all_cells() {
  std::vector<std::pair<Cell*, WeakStorage>> weak;
  {
    std::lock_guard<std::mutex> lock(graph_lock());
    for_each_cell_locked([&](Cell* c) {
      if (c->storage._unsafe_get_target()) weak.emplace_back(c, c->storage);
    });
  }
  std::vector<std::pair<Cell*, StoragePtr>> held;
  for (auto& [c, w] : weak)
    if (StoragePtr s = w.lock()) {
      if (cell_of(s.get()) == c) held.emplace_back(c, std::move(s));
    }
  return held;
}

// Storages that were cells of an earlier budget, for those that nobody but a graph of autograd holds. Used with the
// GIL.
std::vector<WeakStorage>& former_cells() {
  static auto* f = new std::vector<WeakStorage>;
  return *f;
}

// close(): brings everything back, takes the cells off their storages, closes the tier.
PyObject* py_close(PyObject*, PyObject*) {
  return guarded([&]() -> PyObject* {
    if (!budget.open) Py_RETURN_NONE;
    budget.pool->set_budget(MM_UNLIMITED);
    budget.options.torture = false;
    struct Staying {  // what is back stays
      Staying() { nothing_leaves(true); }
      ~Staying() { nothing_leaves(false); }
    };
    end_watch();
    forget_captures();
    std::optional<Staying> staying(std::in_place);
    std::string wrong;
    forget_periods();
    Py_BEGIN_ALLOW_THREADS;
    try {
      finish_transfers();
    } catch (const std::exception& e) {
      wrong = e.what();
    }
    drop_what_waits();
    Py_END_ALLOW_THREADS;
    auto cells = all_cells();
    Py_BEGIN_ALLOW_THREADS;
    for (auto& [c, s] : cells) {
      pin(c, ticks());
      try {
        bring_back(c);
      } catch (const std::exception& e) {
        wrong = e.what();
      }
      unpin(c);
    }
    forget_works();
    exhume();
    try {
      if (rule_holds(kRuleClosed)) budget.pool->settle();
    } catch (const std::exception& e) {
      wrong = e.what();
    }
    Py_END_ALLOW_THREADS;
    budget.open.store(false, std::memory_order_release);
    catch_unseen_threads(false);
    watch_exports(false);
    // Ops of other threads that began under the budget have pins on cells that end now, or are about to.
    Py_BEGIN_ALLOW_THREADS;
    if (!wait_until_kernel_is_left(60)) wrong = "memmgr: an op of another thread has not ended for a minute";
    Py_END_ALLOW_THREADS;
    staying.reset();
    cells = all_cells();  // with those that were born meanwhile
    cut_recipes(true);
    for (auto& [c, s] : cells)
      if (cell_of(s.get()) == c && c->resident()) {
        if (!c->small) former_cells().emplace_back(s);
        unadopt(c);
      }
    cells.clear();
    {
      // What could not come back is lost with the tier: nobody may take a later tier's slot for it.
      std::lock_guard<std::mutex> lock(graph_lock());
      for_each_cell_locked([](Cell* c) { c->slot = -1; });
    }
    Py_BEGIN_ALLOW_THREADS;
    drop_what_waits();
    stop_dropper();
    Py_END_ALLOW_THREADS;
    budget.pool->uninstall();
    mm_arena_set_layout(budget.arena, MM_REMAP_FIRST, 0);
    if (budget.tier) {
      finish_transfers();
      mm_tier_close(budget.tier);
      budget.tier = nullptr;
    }
    TORCH_CHECK(wrong.empty(), wrong);
    Py_RETURN_NONE;
  });
}

PyObject* py_see_this_thread(PyObject*, PyObject* on) {
  const bool before = thread_is_seen();
  see_this_thread(PyObject_IsTrue(on) == 1);
  return PyBool_FromLong(before);
}

// adopt(tensor or cdata) -> bytes that became (or are) a cell
PyObject* py_adopt(PyObject*, PyObject* o) {
  return guarded([&]() -> PyObject* {
    const StoragePtr s = storage_of(o);
    Cell* c = nullptr;
    if (s && budget.open) {
      c = cell_of(s.get());
      if (!c && adoptable(s.get()) && s->nbytes() >= budget.options.small_bytes) c = adopt(s.get());
    }
    return PyLong_FromUnsignedLongLong(c ? c->nbytes : 0);
  });
}

// adopt_all() -> bytes: what earlier budgets had, the tensors that Python's garbage collector knows, and their
// gradients. The list of its objects comes and goes without a bytecode in between, so nobody meets a reference that is
// not his.
PyObject* py_adopt_all(PyObject*, PyObject*) {
  PyObject* gc = PyImport_ImportModule("gc");
  PyObject* all = gc ? PyObject_CallMethod(gc, "get_objects", nullptr) : nullptr;
  Py_XDECREF(gc);
  if (!all) return nullptr;
  std::vector<StoragePtr> found;
  const auto add = [&](const at::Tensor& t) {
    if (!t.defined() || !t.unsafeGetTensorImpl()->has_storage()) return;
    c10::StorageImpl* s = t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    if (adoptable(s) && s->nbytes() >= budget.options.small_bytes) found.push_back(StoragePtr::reclaim_copy(s));
  };
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(all); ++i) {
    PyObject* o = PyList_GET_ITEM(all, i);
    if (!PyType_IsSubtype(Py_TYPE(o), reinterpret_cast<PyTypeObject*>(THPVariableClass))) continue;  // asks no object
    const at::Tensor& t = THPVariable_Unpack(o);
    add(t);
    if (t.defined() && t.is_leaf()) add(t.grad());
  }
  Py_DECREF(all);
  for (WeakStorage& w : former_cells())
    if (StoragePtr s = w.lock())
      if (adoptable(s.get()) && s->nbytes() >= budget.options.small_bytes) found.push_back(std::move(s));
  former_cells().clear();
  uint64_t bytes = 0;
  for (const StoragePtr& s : found)
    if (const Cell* c = adopt(s.get())) bytes += c->nbytes;
  return PyLong_FromUnsignedLongLong(bytes);
}

// name(tensor or cdata) -> a number that stands for the address, 0 where there is no cell: from a range that is never
// mapped, and never used for another storage.
PyObject* py_name(PyObject*, PyObject* o) {
  return guarded([&]() -> PyObject* {
    const StoragePtr s = storage_of(o);
    Cell* c = s ? cell_of(s.get()) : nullptr;
    if (!c || !budget.open) return PyLong_FromLong(0);
    uint64_t name = (uint64_t{1} << 62) + c->serial;
    if (THPVariable_Check(o)) {
      const at::Tensor& t = THPVariable_Unpack(o);
      name += static_cast<uint64_t>(t.storage_offset()) * t.itemsize();
    }
    return PyLong_FromUnsignedLongLong(name);
  });
}

// settle(): what was adopted past the limit leaves. Returns the bytes that are resident beyond it still.
PyObject* py_settle(PyObject*, PyObject*) {
  return guarded([&]() -> PyObject* {
    uint64_t beyond = 0;
    Py_BEGIN_ALLOW_THREADS;
    const uint64_t limit = mm_arena_budget(budget.arena);
    for (int i = 0; i < 1000; ++i) {
      const uint64_t now = mm_arena_resident(budget.arena);
      beyond = now > limit ? now - limit : 0;
      if (!beyond || !reclaim_callback(budget.pool, beyond, beyond, i)) break;
    }
    Py_END_ALLOW_THREADS;
    mm_arena_reset_peak(budget.arena);  // what was there before the budget is none of its doing
    return PyLong_FromUnsignedLongLong(beyond);
  });
}

PyObject* py_escape(PyObject*, PyObject* args) {
  PyObject* o;
  int why;
  if (!PyArg_ParseTuple(args, "Oi", &o, &why)) return nullptr;
  return guarded([&]() -> PyObject* {
    const StoragePtr s = storage_of(o);
    if (!s || !budget.open) Py_RETURN_FALSE;
    PyThreadState* saved = PyEval_SaveThread();
    try {
      Cell* c = cell_of(s.get());
      if (!c && adoptable(s.get())) {
        make_room_for(s.get());
        c = adopt(s.get());
      }
      if (c) escape(c, static_cast<Escape>(why));
    } catch (...) {
      PyEval_RestoreThread(saved);
      throw;
    }
    PyEval_RestoreThread(saved);
    Py_RETURN_TRUE;
  });
}

// ---- Pin: keeps the bytes of tensors where they are while it lives ----

struct PinObject {
  PyObject_HEAD std::vector<std::pair<Cell*, StoragePtr>>* cells;
  bool region, reader;
};

void pin_dealloc(PyObject* self) {
  auto* pins = reinterpret_cast<PinObject*>(self)->cells;
  if (reinterpret_cast<PinObject*>(self)->region) --tl_regions;
  if (reinterpret_cast<PinObject*>(self)->reader) --tl_readers;
  for (auto& [c, s] : *pins) {
    watch_writes(c);
    unpin(c);
  }
  delete pins;
  Py_TYPE(self)->tp_free(self);
}

PyTypeObject pin_type = [] {
  PyTypeObject t{PyVarObject_HEAD_INIT(nullptr, 0)};
  t.tp_name = "memmgr._pager.Pin";
  t.tp_basicsize = sizeof(PinObject);
  t.tp_flags = Py_TPFLAGS_DEFAULT;
  t.tp_dealloc = pin_dealloc;
  t.tp_doc = "Keeps the bytes of storages in memory, where they are, while it lives (rule 9: scoped).";
  return t;
}();

// A pin of these. region: this thread's ops are not paged meanwhile, since whoever called reads what they make without
// an op. reader: it lives as long as a call of this thread, which has said whether it writes.
PyObject* new_pin(std::vector<StoragePtr> storages, bool written, bool region, bool reader) {
  auto* self = PyObject_New(PinObject, &pin_type);
  if (!self) return nullptr;
  self->cells = new std::vector<std::pair<Cell*, StoragePtr>>;
  self->region = self->reader = false;
  PyObject* result = guarded([&]() -> PyObject* {
    PyThreadState* saved = PyEval_SaveThread();
    try {
      for (StoragePtr& s : storages) {
        Cell* c = cell_of(s.get());
        if (!c && budget.open && adoptable(s.get()) && (written || s->nbytes() >= budget.options.small_bytes)) {
          make_room_for(s.get());
          c = adopt(s.get());
        }
        if (!c) continue;
        pin(c, ticks());
        self->cells->emplace_back(c, std::move(s));
        bring_back(c);
        if (written) begin_new_version(c);
      }
    } catch (...) {
      PyEval_RestoreThread(saved);
      throw;
    }
    PyEval_RestoreThread(saved);
    self->region = region;
    self->reader = reader;
    if (region) ++tl_regions;
    if (reader) ++tl_readers;
    return reinterpret_cast<PyObject*>(self);
  });
  if (!result) Py_DECREF(self);
  return result;
}

// pin(sequence of tensors or cdatas[, written[, region[, held]]]) -> Pin. held: beyond this call.
PyObject* py_pin(PyObject*, PyObject* args) {
  PyObject* sequence;
  int written = 0, region = 0, held = 0;
  if (!PyArg_ParseTuple(args, "O|ppp", &sequence, &written, &region, &held)) return nullptr;
  PyObject* items = PySequence_Fast(sequence, "a sequence of tensors or storages' addresses");
  if (!items) return nullptr;
  std::vector<StoragePtr> storages;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items); ++i)
    if (StoragePtr s = storage_of(PySequence_Fast_GET_ITEM(items, i))) storages.push_back(std::move(s));
  Py_DECREF(items);
  return new_pin(std::move(storages), written, region, !held);
}

// pin_reducer(reducer, gradients) -> Pin: what DDP's reducer reads outside of ops, None if it waits for no gradient.
PyObject* py_pin_reducer(PyObject*, PyObject* args) {
  PyObject* reducer;
  int gradients;
  if (!PyArg_ParseTuple(args, "Op", &reducer, &gradients)) return nullptr;
  std::vector<StoragePtr> storages = storages_of_reducer(reducer, gradients);
  if (storages.empty()) Py_RETURN_NONE;
  return new_pin(std::move(storages), false, false, false);
}

PyObject* py_guard(PyObject*, PyObject* function) { return PyBool_FromLong(guard_function(function)); }

PyObject* py_unguard_all(PyObject*, PyObject*) {
  unguard_functions();
  forget_foreign_calls();
  Py_RETURN_NONE;
}

PyObject* py_watch_foreign(PyObject*, PyObject*) {
  watch_foreign_calls();
  Py_RETURN_NONE;
}

PyObject* py_libraries(PyObject*, PyObject*) {
  PyObject* list = PyList_New(0);
  for (const std::string& path : libraries_that_use_torch()) {
    PyObject* name = list ? PyUnicode_DecodeFSDefault(path.c_str()) : nullptr;
    if (name) PyList_Append(list, name);
    Py_XDECREF(name);
  }
  return list;
}

PyObject* py_reducers_listen(PyObject*, PyObject* begin) {
  const bool on = PyObject_IsTrue(begin) == 1;
  Py_BEGIN_ALLOW_THREADS;
  reducers_listen(on);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

// take_away(tensor, turn) -> bytes that left: for tests
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

// What is known about a cell, noted under the lock. Python's objects are made after it: making one may collect garbage,
// and with it end a storage, which takes the lock.
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
    trusted = recipe && v->recipe->kind->trust.load() == Trust::kYes;
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
    std::lock_guard<std::mutex> lock(graph_lock());
    if (Cell* c = s ? cell_of(s.get()) : nullptr) row.emplace(c);
  }
  if (!row) Py_RETURN_NONE;
  return row->object();
}

// cells() -> [dict]: all of them
PyObject* py_cells(PyObject*, PyObject*) {
  std::vector<CellRow> rows;
  {
    std::lock_guard<std::mutex> lock(graph_lock());
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

PyObject* py_stats(PyObject*, PyObject*) {
  PyObject* d = PyDict_New();
  if (!d || !budget.arena) return d;
  mm_arena_stats a{};
  mm_arena_stats_get(budget.arena, &a);
  put(d, "budget_bytes", a.budget_bytes);
  put(d, "resident_bytes.current", a.live_bytes + a.outside_bytes);
  put(d, "resident_bytes.peak", a.resident_peak_bytes);
  put(d, "unmanaged_peak_bytes", a.unmanaged_peak_bytes);
  put(d, "floor_bytes", floor_bytes());
  put(d, "reclaims", a.reclaims);
  put(d, "remapped_bytes", a.remapped_bytes);
  put(d, "resident_cell_bytes", resident_cell_bytes.load());
  put(d, "escaped_bytes", escaped_bytes.load());
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
  COUNTER(ops)
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
  COUNTER(short_periods)
  COUNTER(remat_ns)
  COUNTER(stall_ns)
#undef COUNTER
  uint64_t cells, pinned = 0, orphans = 0, evicted = 0, offloaded = 0, largest = 0;
  {
    std::lock_guard<std::mutex> lock(graph_lock());
    cells = count_cells_locked();
    for_each_cell_locked([&](Cell* c) {
      pinned += !c->small && (c->state.load() & kPinMask) ? 1 : 0;
      orphans += c->storage._unsafe_get_target() ? 0 : 1;
      largest = std::max(largest, c->nbytes);
      if (c->state.load() & kAbsent) (c->absence == Absence::kEvicted ? evicted : offloaded) += c->nbytes;
    });
  }
  put(d, "cells", cells);
  put(d, "pinned_cells", pinned);
  put(d, "orphans", orphans);
  put(d, "evicted_now_bytes", evicted);
  put(d, "offloaded_now_bytes", offloaded);
  put(d, "largest_cell_bytes", largest);
  return d;
}

PyObject* py_drain(PyObject*, PyObject*) {
  Py_BEGIN_ALLOW_THREADS;
  drop_what_waits();
  Py_END_ALLOW_THREADS;
  poll_works();
  Py_RETURN_NONE;
}

// set_errors(make_budget_error, recompute_error)
PyObject* py_set_errors(PyObject*, PyObject* args) {
  PyObject *make, *wrong;
  if (!PyArg_ParseTuple(args, "OO", &make, &wrong)) return nullptr;
  Py_XSETREF(make_budget_error, Py_NewRef(make));
  Py_XSETREF(recompute_error, Py_NewRef(wrong));
  Py_RETURN_NONE;
}

PyObject* py_set_link(PyObject*, PyObject* o) {
  const double seconds = PyFloat_AsDouble(o);
  if (PyErr_Occurred()) return nullptr;
  set_link(seconds);
  Py_RETURN_NONE;
}

PyObject* py_use_plugin(PyObject*, PyObject* o) {
  const auto* table = static_cast<const mm_plugin*>(PyLong_AsVoidPtr(o));
  if (PyErr_Occurred()) return nullptr;
  return guarded([&]() -> PyObject* {
    use_plugin(table);
    Py_RETURN_NONE;
  });
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
  put(d, "driver_errors", s.driver_errors);
  return d;
}

// read_ahead(tensor or cdata) -> is it on its way? for tests
PyObject* py_read_ahead(PyObject*, PyObject* o) {
  return guarded([&]() -> PyObject* {
    const StoragePtr s = storage_of(o);
    Cell* c = s ? cell_of(s.get()) : nullptr;
    return PyBool_FromLong(c && begin_read(c));
  });
}

PyObject* py_begin_capture(PyObject*, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyThreadState* saved = PyEval_SaveThread();
    try {
      if (budget.open) begin_capture();
    } catch (...) {
      PyEval_RestoreThread(saved);
      throw;
    }
    PyEval_RestoreThread(saved);
    Py_RETURN_NONE;
  });
}

PyObject* py_end_capture(PyObject*, PyObject*) {
  Py_BEGIN_ALLOW_THREADS;
  end_capture();
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

PyObject* py_check_arena(PyObject*, PyObject*) {
  char why[400] = {};
  if (budget.arena && mm_arena_check(budget.arena, why, sizeof why) != 0)
    return PyErr_Format(PyExc_RuntimeError, "%s", why);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"open", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&py_open)), METH_VARARGS | METH_KEYWORDS,
     "opens a budget"},
    {"close", py_close, METH_NOARGS, "brings everything back and closes the budget"},
    {"see_this_thread", py_see_this_thread, METH_O, "are the ops of this thread seen (rule 12)? returns what was"},
    {"adopt", py_adopt, METH_O, "adopt(tensor) -> bytes of its cell, 0 if it has none"},
    {"adopt_all", py_adopt_all, METH_NOARGS, "adopts every tensor that Python knows -> bytes"},
    {"name", py_name, METH_O, "name(tensor or cdata) -> a number to compare instead of the address, 0: it has none"},
    {"settle", py_settle, METH_NOARGS, "lets go of what is beyond the limit -> bytes that still are"},
    {"escape", py_escape, METH_VARARGS, "escape(tensor or cdata, why): its address was handed out for good"},
    {"pin", py_pin, METH_VARARGS, "pin(tensors, written=False, region=False, held=False) -> Pin"},
    {"pin_reducer", py_pin_reducer, METH_VARARGS, "pin_reducer(reducer, gradients) -> Pin or None"},
    {"guard", py_guard, METH_O, "guard(function) -> is it one that pybind11 bound, and not guarded yet?"},
    {"unguard_all", py_unguard_all, METH_NOARGS, "functions of extensions are as they were, and nobody watches"},
    {"watch_foreign_calls", py_watch_foreign, METH_NOARGS, "ops and autograd functions of extensions are watched"},
    {"libraries_that_use_torch", py_libraries, METH_NOARGS, "paths of the loaded libraries that name c10's symbols"},
    {"reducers_listen", py_reducers_listen, METH_O, "a backward with reducers that wait begins (True) or ends"},
    {"take_away", py_take_away, METH_VARARGS, "take_away(tensor, turn=-1) -> bytes that left; for tests"},
    {"describe", py_describe, METH_O, "describe(tensor) -> what is known about its cell, or None"},
    {"cells", py_cells, METH_NOARGS, "what is known about every cell"},
    {"stats", py_stats, METH_NOARGS, "figures"},
    {"drain", py_drain, METH_NOARGS, "references and works that wait are looked at"},
    {"set_errors", py_set_errors, METH_VARARGS,
     "(text -> the exception that out of memory becomes, the class of wrong bytes)"},
    {"set_link", py_set_link, METH_O, "seconds a byte to the tier, one way"},
    {"read_ahead", py_read_ahead, METH_O, "read_ahead(tensor) -> is it on its way? for tests"},
    {"begin_capture", py_begin_capture, METH_NOARGS, "a graph is about to be captured"},
    {"end_capture", py_end_capture, METH_NOARGS, "its capture has ended"},
    {"use_plugin", py_use_plugin, METH_O, "use_plugin(address of the table of CUDA's allocator)"},
    {"leave_out", py_leave_out, METH_O, "stream rules (a mask) that are not kept; for tests"},
    {"device_stats", py_device_stats, METH_NOARGS, "figures of the device's memory; empty on the CPU"},
    {"check", py_check_arena, METH_NOARGS, "raises if an invariant of the arena is broken"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_pager", "memmgr's pager", -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyObject* pin_arguments(std::vector<StoragePtr> storages) { return new_pin(std::move(storages), true, false, true); }

// What `set` has made Python's error is thrown as torch hands such errors on.
template <class F>
[[noreturn]] static void throw_python(F&& set) {
  const PyGILState_STATE gil = PyGILState_Ensure();
  set();
  python_error error;
  error.persist();
  PyGILState_Release(gil);
  throw error;
}

void raise_budget_error(const c10::OutOfMemoryError& e) {
  if (!Py_IsInitialized() || !make_budget_error) return;
  throw_python([&] { set_out_of_memory(e.what_without_backtrace()); });
}

void raise_wrong_bytes(const c10::Error& e) {
  if (!Py_IsInitialized() || !recompute_error) return;
  throw_python([&] { PyErr_SetString(recompute_error, e.what_without_backtrace()); });
}

}  // namespace memmgr::pager

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__pager() {
  using namespace memmgr::pager;
  if (PyType_Ready(&pin_type) < 0) return nullptr;
  PyObject* module = PyModule_Create(&definition);
  if (module && (!add_plan_functions(module) || !add_ranking_functions(module) ||
                 PyModule_AddFunctions(module, observe_methods) < 0))
    Py_CLEAR(module);
  return module;
}
