// The Python module's functions for the pool and the tier: figures, and the probe of how fast a copy is.
#include <Python.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "budget.h"
#include "module.h"
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

// set_limit(bytes): of the open budget from now on; `settle` lets go of what is beyond it
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
  if (!budget.tier) return PyDict_New();
  mm_tier_stats t{};
  mm_tier_stats_get(budget.tier, &t);
  return figures({{"capacity_bytes", t.capacity_bytes},
                  {"used_bytes", t.used_bytes},
                  {"used_peak_bytes", t.used_peak_bytes},
                  {"file_bytes", t.file_bytes},
                  {"written_bytes", t.written_bytes},
                  {"read_bytes", t.read_bytes},
                  {"errors", t.errors},
                  {"direct", static_cast<uint64_t>(t.direct)}});
}

double cpu_seconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

// tier_probe(bytes) -> (seconds to write them, seconds to read them back, seconds of this thread for a new block of so
// many), None where there is no room to try. The tier copies without the CPU; what a copy takes of it is the pages
// that the system gives, zeroed, to whatever comes back.
PyObject* py_tier_probe(PyObject*, PyObject* o) {
  const size_t n = PyLong_AsSize_t(o);
  if (PyErr_Occurred()) return nullptr;
  if (!budget.tier) Py_RETURN_NONE;
  const bool on_host = budget.pool->on_host();
  void* p = nullptr;
  at::DataPtr block;
  if (!on_host)
    p = (block = budget.pool->try_allocate(n, 0)).get();
  else if (posix_memalign(&p, 4096, n) != 0)
    p = nullptr;
  if (!p) Py_RETURN_NONE;
  uint64_t begun, written = 0, read = 0;
  int64_t slot;
  double worked = 0;
  Py_BEGIN_ALLOW_THREADS;
  if (on_host) {  // what a machine's host gives it for the first time takes several times as long
    std::memset(p, 1, n);
    madvise(p, n, MADV_DONTNEED);
  }
  constexpr size_t kPieces = 4;  // the least of them: the system may have been at something else
  for (size_t i = 0; i < kPieces && on_host; ++i) {
    const double before = cpu_seconds();
    std::memset(static_cast<char*>(p) + i * (n / kPieces), 1, n / kPieces);
    const double took = (cpu_seconds() - before) * kPieces;
    worked = i ? std::min(worked, took) : took;
  }
  begun = now_ns();
  slot = mm_tier_write_now(budget.tier, p, n);
  if (slot >= 0) mm_tier_wait(budget.tier, slot);
  written = now_ns();
  if (slot >= 0) {
    if (mm_tier_read_now(budget.tier, slot, p) == 0 && mm_tier_wait(budget.tier, slot) >= 0) read = now_ns();
    mm_tier_free(budget.tier, slot);
  }
  if (on_host) free(p);
  block.clear();
  if (!on_host) mm_arena_reset_peak(budget.arena);  // the block was the budget's, but not the run's
  Py_END_ALLOW_THREADS;
  if (!read) Py_RETURN_NONE;
  return Py_BuildValue("(ddd)", static_cast<double>(written - begun) * 1e-9, static_cast<double>(read - written) * 1e-9,
                       worked);
}

// tier_inject(write errno, after writes, read errno, after reads): for tests
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
    {"tier_probe", py_tier_probe, METH_O, "tier_probe(bytes) -> seconds (to write, to read, for a new block)"},
    {"tier_inject", py_tier_inject, METH_VARARGS, "lets writes and reads of the tier fail; for tests"},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace memmgr::pager
