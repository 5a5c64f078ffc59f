#include "python/bind_pool.h"

// The Python module's functions for the pool and the tier: figures, and a measurement of a copy's speed.
#include <Python.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "base/budget.h"
#include "base/clock.h"
#include "pools/pool.h"

namespace memmgr::pager {

namespace {

PyObject* py_add_outside(PyObject*, PyObject* o) {
  const long long delta = PyLong_AsLongLong(o);
  if (PyErr_Occurred()) return nullptr;
  if (budget.arena) mm_arena_add_outside(budget.arena, delta);
  Py_RETURN_NONE;
}

PyObject* py_resident(PyObject*, PyObject*) {
  return PyLong_FromUnsignedLongLong(budget.arena ? mm_arena_resident(budget.arena) : 0);
}

// set_limit(bytes): the limit of the open budget from now on. `settle` evicts cells beyond it.
PyObject* py_set_limit(PyObject*, PyObject* o) {
  const unsigned long long bytes = PyLong_AsUnsignedLongLong(o);
  if (PyErr_Occurred()) return nullptr;
  if (budget.open) budget.pool->set_budget(bytes);
  Py_RETURN_NONE;
}

struct Figure {
  const char* name;
  uint64_t value;
};
template <size_t n>
PyObject* figures(const Figure (&all)[n]) {
  PyObject* dict = PyDict_New();
  for (const Figure& figure : all) {
    PyObject* value = PyLong_FromUnsignedLongLong(figure.value);
    if (dict && (!value || PyDict_SetItemString(dict, figure.name, value) < 0)) Py_CLEAR(dict);
    Py_XDECREF(value);
  }
  return dict;
}

PyObject* py_arena_stats(PyObject*, PyObject*) {
  mm_arena_stats a{};
  if (budget.arena) mm_arena_stats_get(budget.arena, &a);
  return figures({{"budget_bytes", a.budget_bytes},
                  {"live_bytes", a.live_bytes},
                  {"outside_bytes", a.outside_bytes},
                  {"resident_peak_bytes", a.resident_peak_bytes},
                  {"unmanaged_peak_bytes", a.unmanaged_peak_bytes},
                  {"committed_peak_bytes", a.committed_peak_bytes},
                  {"reclaims", a.reclaims},
                  {"search_nanoseconds", a.search_nanoseconds},
                  {"longest_run_bytes", a.longest_run_bytes},
                  {"placeable_bytes", a.placeable_bytes}});
}

// tier_stats() -> dict, empty without a tier
PyObject* py_tier_stats(PyObject*, PyObject*) {
  if (!budget.tier_writes) return PyDict_New();
  mm_tier_stats t{};
  mm_tier_stats_get(budget.tier, &t);
  return figures({{"capacity_bytes", t.capacity_bytes},
                  {"used_bytes", t.used_bytes},
                  {"used_peak_bytes", t.used_peak_bytes},
                  {"file_bytes", t.file_bytes},
                  {"written_bytes", t.written_bytes},
                  {"read_bytes", t.read_bytes},
                  {"errors", t.errors},
                  {"cpu_nanoseconds", t.cpu_nanoseconds},
                  {"direct", static_cast<uint64_t>(t.direct)}});
}

// tier_probe(bytes) -> seconds (of a write, of a read, of a processor for both); None: there is no room for it
PyObject* py_tier_probe(PyObject*, PyObject* o) {
  const size_t n = PyLong_AsSize_t(o);
  if (PyErr_Occurred()) return nullptr;
  if (!budget.tier_writes) Py_RETURN_NONE;
  const bool on_host = budget.pool->on_host();
  const OwnWork own;
  void* p = nullptr;
  at::DataPtr block;
  if (!on_host)
    p = (block = budget.pool->try_allocate(n, 0)).get();
  else if (posix_memalign(&p, 4096, n) != 0)
    p = nullptr;
  if (!p) Py_RETURN_NONE;
  uint64_t begun, written = 0, read = 0;
  int64_t slot;
  mm_tier_stats before{}, after{};
  Py_BEGIN_ALLOW_THREADS;
  if (on_host) std::memset(p, 1, n);
  mm_tier_stats_get(budget.tier, &before);
  begun = now_ns();
  slot = mm_tier_write_now(budget.tier, p, n);
  if (slot >= 0) mm_tier_wait(budget.tier, slot);
  written = now_ns();
  if (slot >= 0) {
    if (mm_tier_read_now(budget.tier, slot, p) == 0 && mm_tier_wait(budget.tier, slot) >= 0) read = now_ns();
    mm_tier_free(budget.tier, slot);
  }
  mm_tier_stats_get(budget.tier, &after);
  if (on_host) free(p);
  block.clear();
  if (!on_host) mm_arena_reset_peak(budget.arena);  // the block counted in the budget, but not in the run
  Py_END_ALLOW_THREADS;
  if (!read) Py_RETURN_NONE;
  return Py_BuildValue("(ddd)", static_cast<double>(written - begun) * 1e-9, static_cast<double>(read - written) * 1e-9,
                       static_cast<double>(after.cpu_nanoseconds - before.cpu_nanoseconds) * 1e-9);
}

// tier_inject(write errno, after writes, read errno, after reads); for tests
PyObject* py_tier_inject(PyObject*, PyObject* args) {
  int write, writes, read, reads;
  if (!PyArg_ParseTuple(args, "iiii", &write, &writes, &read, &reads)) return nullptr;
  if (budget.tier) mm_tier_inject(budget.tier, write, writes, read, reads);
  Py_RETURN_NONE;
}

}  // namespace

PyMethodDef pool_methods[] = {
    {"add_outside", py_add_outside, METH_O, "bytes more that are on the device and not of the pool"},
    {"set_limit", py_set_limit, METH_O, "another limit for the open budget, in bytes"},
    {"resident", py_resident, METH_NOARGS, "bytes on the device"},
    {"arena_stats", py_arena_stats, METH_NOARGS, "the pool's figures"},
    {"tier_stats", py_tier_stats, METH_NOARGS, "the tier's figures"},
    {"tier_probe", py_tier_probe, METH_O, "tier_probe(bytes) -> seconds (to write, to read, of a CPU)"},
    {"tier_inject", py_tier_inject, METH_VARARGS, "lets writes and reads of the tier fail; for tests"},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace memmgr::pager
