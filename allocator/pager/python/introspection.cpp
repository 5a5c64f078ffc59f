#include "python/introspection.h"

#include <sys/mman.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <tuple>

#include "base/budget.h"
#include "base/clock.h"
#include "base/events.h"
#include "base/lock.h"
#include "base/module_of_op.h"
#include "base/share.h"
#include "base/tensors.h"
#include "cells/births.h"
#include "cells/cell.h"
#include "cells/fixed_memory.h"
#include "cells/types.h"
#include "cells/version.h"
#include "concurrency/deferred_steps.h"
#include "ops/op_info.h"
#include "plan/follow.h"
#include "pools/pool.h"
#include "recipes/op_signature.h"

namespace memmgr::pager {

namespace {

PyObject* name_of(const OpInfo* info) {
  if (!info) Py_RETURN_NONE;
  std::string name = info->op.schema().name();
  const size_t colons = name.find("::");
  if (colons != std::string::npos) name.replace(colons, 2, ".");
  const std::string& overload = info->op.schema().overload_name();
  return PyUnicode_FromString((name + "." + (overload.empty() ? "default" : overload)).c_str());
}

const Recipe* maker_of(const Cell* c) { return c->version ? c->version->recipe : nullptr; }

// ---- the address space ----

enum Stretch : int { kFree, kOther, kMayLeave, kHeld, kLeaving, kArriving, kHole, kStretches };

struct Piece {
  uint64_t offset, bytes;
  int state;
};
struct Strip {
  std::vector<std::pair<uint64_t, int>> marks;  // offset of a block's start, and its state
  std::vector<Piece> pieces;
};

int add_piece(void* user, uint64_t offset, uint64_t bytes, int state) {
  auto* strip = static_cast<Strip*>(user);
  int what = state == 1 ? kOther : state == 0 ? kFree : kHole;
  if (state == 1) {
    const auto it = std::lower_bound(strip->marks.begin(), strip->marks.end(), std::make_pair(offset, 0));
    if (it != strip->marks.end() && it->first < offset + bytes) what = it->second;
  }
  strip->pieces.push_back({offset, bytes, what});
  return 0;
}

bool is_held(const Cell* c) { return (c->state.load() & kPinMask) != 0 || c->escape != Escape::kNone; }

// ---- Python ----

PyObject* py_set_detail(PyObject*, PyObject* on) {
  watch_events(PyObject_IsTrue(on) == 1);
  Py_RETURN_NONE;
}

PyObject* py_set_learning(PyObject*, PyObject* on) {
  learn_modules(PyObject_IsTrue(on) == 1);
  Py_RETURN_NONE;
}

PyObject* py_set_module(PyObject*, PyObject* number) {
  set_current_module(static_cast<uint32_t>(PyLong_AsUnsignedLongMask(number)));
  Py_RETURN_NONE;
}

PyObject* py_ops_astray(PyObject*, PyObject*) { return PyLong_FromUnsignedLongLong(take_mispredicted()); }

// end_pass() -> (resident, unmanaged): the high-water marks of the pass that ends in this thread
PyObject* py_end_pass(PyObject*, PyObject*) {
  drop_unread_pending();
  end_pass_of_modules();
  end_pass_of_births();
  mm_arena_stats a{};
  if (budget.arena) mm_arena_stats_get(budget.arena, &a);
  if (budget.arena) mm_arena_reset_peak(budget.arena);
  return Py_BuildValue("(KK)", static_cast<unsigned long long>(a.resident_peak_bytes),
                       static_cast<unsigned long long>(a.unmanaged_peak_bytes));
}

// drain_events() -> ([(event, op or None, module, count, bytes, seconds)], events that found no entry)
PyObject* py_drain_events(PyObject*, PyObject*) {
  const EventSums taken = take_events();
  PyObject* list = PyList_New(0);
  for (const auto& [key, sum] : taken.sums) {
    PyObject* item = list
                         ? Py_BuildValue("(iNIKKd)", static_cast<int>(std::get<0>(key)), name_of(std::get<1>(key)),
                                         std::get<2>(key), static_cast<unsigned long long>(sum.count),
                                         static_cast<unsigned long long>(sum.bytes), static_cast<double>(sum.ns) * 1e-9)
                         : nullptr;
    if (!item || PyList_Append(list, item) < 0) Py_CLEAR(list);
    Py_XDECREF(item);
  }
  return list ? Py_BuildValue("(NK)", list, static_cast<unsigned long long>(taken.unlisted)) : nullptr;
}

// watch_cells(limit) -> ([(bytes, state, has a copy, cannot be evicted now, references, seconds of its op, seconds
// since its last touch, can be rematerialized, op or None, module, False, storage's address, line)] largest first,
// {module: bytes (resident, of these not evictable, absent)})
PyObject* py_watch_cells(PyObject*, PyObject* o) {
  const long limit = PyLong_AsLong(o);
  if (limit < 0) return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_ValueError, "a negative limit");
  struct Row {
    uint64_t bytes;
    int state;
    bool copy, held, again;
    unsigned references;
    double cost, age;
    const OpInfo* op;
    uint32_t module;
    uint64_t storage;
    uint32_t line;
  };
  struct Share {
    unsigned long long present = 0, held = 0, absent = 0;
  };
  std::vector<Row> rows;
  std::map<uint32_t, Share> modules;
  const uint64_t now = ticks();
  {
    const Hold lock(graph_lock());
    for_each_cell_locked([&](Cell* c) {
      if (c->small) return;
      const bool absent = c->state.load() & kAbsent, held = !absent && is_held(c);
      const Recipe* r = maker_of(c);
      const Origin origin = origin_of_locked(c);
      Share& share = modules[origin.module];
      (absent ? share.absent : share.present) += c->nbytes;
      if (held) share.held += c->nbytes;
      const uint64_t touched = c->last_touch.load(std::memory_order_relaxed);
      rows.push_back({c->nbytes,
                      !absent                           ? 0
                      : c->absence == Absence::kEvicted ? 1
                                                        : 2,
                      c->slot >= 0, held, r && recipe_available_locked(r) && budget.options.may_evict,
                      c->storage.use_count(), r ? seconds_of(r) : 0,
                      seconds_of_ticks(now > touched ? now - touched : 0), origin.op, origin.module,
                      reinterpret_cast<uintptr_t>(c->storage._unsafe_get_target()), c->birth.line});
    });
  }
  const size_t n = std::min(rows.size(), static_cast<size_t>(limit));
  std::partial_sort(rows.begin(), rows.begin() + static_cast<ptrdiff_t>(n), rows.end(),
                    [](const Row& a, const Row& b) { return a.bytes > b.bytes; });
  PyObject* list = PyList_New(0);
  for (size_t i = 0; i < n; ++i) {
    const Row& r = rows[i];
    PyObject* item = list ? Py_BuildValue("(KiNNIddNNINKI)", static_cast<unsigned long long>(r.bytes), r.state,
                                          PyBool_FromLong(r.copy), PyBool_FromLong(r.held), r.references, r.cost, r.age,
                                          PyBool_FromLong(r.again), name_of(r.op), r.module, PyBool_FromLong(0),
                                          static_cast<unsigned long long>(r.storage), r.line)
                          : nullptr;
    if (!item || PyList_Append(list, item) < 0) Py_CLEAR(list);
    Py_XDECREF(item);
  }
  PyObject* shares = PyDict_New();
  for (const auto& [module, share] : modules) {
    PyObject* key = PyLong_FromUnsignedLong(module);
    PyObject* value = Py_BuildValue("(KKK)", share.present, share.held, share.absent);
    if (shares && (!key || !value || PyDict_SetItem(shares, key, value) < 0)) Py_CLEAR(shares);
    Py_XDECREF(key);
    Py_XDECREF(value);
  }
  if (list && shares) return Py_BuildValue("(NN)", list, shares);
  Py_XDECREF(list);
  Py_XDECREF(shares);
  return nullptr;
}

// memory_map(columns) -> (bytes of address space shown, [bytes per state] * columns). The states: free, other,
// evictable, not evictable now, next to be evicted (queued, or with a copy in the tier), arriving (never: a block is
// not known before the bytes are there), hole. The range ends with its last block that has memory.
PyObject* py_memory_map(PyObject*, PyObject* o) {
  const long columns = PyLong_AsLong(o);
  if (columns < 1 || columns > 4096) return PyErr_Format(PyExc_ValueError, "1 to 4096 columns");
  Strip strip;
  if (budget.arena) {
    const auto* base = static_cast<const char*>(mm_arena_base(budget.arena));
    {
      const Hold lock(graph_lock());
      for_each_cell_locked([&](Cell* c) {
        const void* p = block_of(c);
        if (c->small || !c->resident() || !p || !mm_arena_owns(budget.arena, p)) return;
        const int what = is_held(c) ? kHeld : c->queued_at >= 0 || c->slot >= 0 ? kLeaving : kMayLeave;
        strip.marks.emplace_back(static_cast<uint64_t>(static_cast<const char*>(p) - base), what);
      });
    }
    std::sort(strip.marks.begin(), strip.marks.end());
    mm_arena_walk(budget.arena, &add_piece, &strip);
  }
  // There are plenty of addresses: long stretches without memory would make the rest invisible.
  uint64_t live = 0, span = 0;
  for (const Piece& piece : strip.pieces)
    if (piece.state != kHole) live += piece.bytes;
  while (!strip.pieces.empty() && strip.pieces.back().state == kHole) strip.pieces.pop_back();
  for (Piece& piece : strip.pieces) {
    if (piece.state == kHole) piece.bytes = std::min(piece.bytes, live / 64);
    span += piece.bytes;
  }
  std::vector<std::array<double, kStretches>> sums(static_cast<size_t>(columns));
  const double width = std::max(1.0, static_cast<double>(span) / static_cast<double>(columns));
  double at = 0;
  for (const Piece& piece : strip.pieces) {
    const double end = at + static_cast<double>(piece.bytes);
    for (auto i = static_cast<size_t>(at / width); i < sums.size() && static_cast<double>(i) * width < end; ++i)
      sums[i][static_cast<size_t>(piece.state)] += std::max(
          0.0, std::min(end, static_cast<double>(i + 1) * width) - std::max(at, static_cast<double>(i) * width));
    at = end;
  }
  PyObject* list = PyList_New(0);
  for (const auto& sum : sums) {
    PyObject* column = list ? PyTuple_New(kStretches) : nullptr;
    for (int i = 0; column && i < kStretches; ++i)
      PyTuple_SET_ITEM(column, i, PyLong_FromLongLong(static_cast<long long>(sum[static_cast<size_t>(i)])));
    if (!column || PyList_Append(list, column) < 0) Py_CLEAR(list);
    Py_XDECREF(column);
  }
  return list ? Py_BuildValue("(KN)", static_cast<unsigned long long>(span), list) : nullptr;
}

PyObject* py_storage_info(PyObject*, PyObject* o) {
  if (!THPVariable_Check(o)) Py_RETURN_NONE;
  return info_of_storage(THPVariable_Unpack(o));
}

// resident_cells() -> [(its storage's address, bytes)]; address 0: the storage has ended
PyObject* py_resident_cells(PyObject*, PyObject*) {
  std::vector<std::pair<unsigned long long, unsigned long long>> found;
  {
    const Hold lock(graph_lock());
    for_each_cell_locked([&](Cell* c) {
      if (!c->small && c->resident())
        found.emplace_back(reinterpret_cast<uintptr_t>(c->storage._unsafe_get_target()), c->nbytes);
    });
  }
  PyObject* list = PyList_New(0);
  for (const auto& [storage, bytes] : found) {
    PyObject* item = list ? Py_BuildValue("(KK)", storage, bytes) : nullptr;
    if (!item || PyList_Append(list, item) < 0) Py_CLEAR(list);
    Py_XDECREF(item);
  }
  return list;
}

}  // namespace

PyObject* info_of_storage(const at::Tensor& t) {
  if (!t.defined() || !t.unsafeGetTensorImpl()->has_storage() || !budget.pool ||
      t.device().type() != budget.pool->device.type() ||
      (!t.device().is_cpu() && t.device().index() != budget.pool->device.index()))
    Py_RETURN_NONE;
  c10::StorageImpl* s = t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  const Cell* c = cell_of(s);
  const bool absent = c && (c->state.load() & kAbsent);
  const void* p = pointer_of(s).get();
  const bool counted =
      absent || (c && c->outside) || is_counted_as_fixed(s) || (budget.pool && p && budget.pool->owns(p));
  const auto bytes = static_cast<unsigned long long>(s->nbytes());
  return Py_BuildValue("KKKN", static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(s)), absent ? 0 : bytes,
                       bytes, PyBool_FromLong(counted));
}

PyMethodDef observe_methods[] = {
    {"set_detail", py_set_detail, METH_O, "whether what happens is noted by op and module"},
    {"set_learning", py_set_learning, METH_O, "whether set_module is called for every module"},
    {"set_module", py_set_module, METH_O, "number of the module whose forward runs in this thread"},
    {"ops_astray", py_ops_astray, METH_NOARGS, "ops since the last call whose module is not known"},
    {"end_pass", py_end_pass, METH_NOARGS, "a pass ends in this thread -> its peaks: (resident, unmanaged)"},
    {"drain_events", py_drain_events, METH_NOARGS, "what happened since the last call"},
    {"watch_cells", py_watch_cells, METH_O, "watch_cells(limit): the largest, and sums by module"},
    {"memory_map", py_memory_map, METH_O, "memory_map(columns)"},
    {"storage_info", py_storage_info, METH_O, "storage_info(tensor) -> (address, bytes in memory, bytes, counted)"},
    {"resident_cells", py_resident_cells, METH_NOARGS, "[(storage's address, bytes)]"},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace memmgr::pager
