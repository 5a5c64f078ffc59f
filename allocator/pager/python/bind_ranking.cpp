#include "python/bind_ranking.h"

// The Python module's functions for policies that rank victims ahead of need. No op calls them.

#include <cstring>

#include "residency/victims.h"

namespace memmgr::pager {

namespace {

template <class T, class F>
PyObject* column(const std::vector<Candidate>& from, F&& of) {
  std::vector<T> values;
  values.reserve(from.size());
  for (const Candidate& c : from) values.push_back(static_cast<T>(of(c)));
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(values.data()),
                                   static_cast<Py_ssize_t>(values.size() * sizeof(T)));
}

// candidates() -> (serials, sizes: int64; staleness, cost, chain: float64; recomputable, clean, offloadable: bool), as
// bytes
PyObject* py_candidates(PyObject*, PyObject*) {
  std::vector<Candidate> all;
  Py_BEGIN_ALLOW_THREADS;
  all = candidates();
  Py_END_ALLOW_THREADS;
  PyObject* columns[] = {column<int64_t>(all, [](const Candidate& c) { return c.serial; }),
                         column<int64_t>(all, [](const Candidate& c) { return c.nbytes; }),
                         column<double>(all, [](const Candidate& c) { return c.stale_seconds; }),
                         column<double>(all, [](const Candidate& c) { return c.cost_seconds; }),
                         column<double>(all, [](const Candidate& c) { return c.chain_seconds; }),
                         column<uint8_t>(all, [](const Candidate& c) { return c.droppable; }),
                         column<uint8_t>(all, [](const Candidate& c) { return c.clean; }),
                         column<uint8_t>(all, [](const Candidate& c) { return c.offloadable; })};
  PyObject* result = PyTuple_New(std::size(columns));
  for (size_t i = 0; i < std::size(columns); ++i) {
    if (!result || !columns[i]) {
      Py_XDECREF(columns[i]);
      Py_CLEAR(result);
      continue;
    }
    PyTuple_SET_ITEM(result, static_cast<Py_ssize_t>(i), columns[i]);
  }
  return result;
}

// set_ranking(serials: int64, ways: uint8), as bytes. The first cell is evicted first.
PyObject* py_set_ranking(PyObject*, PyObject* args) {
  Py_buffer serials, ways;
  if (!PyArg_ParseTuple(args, "y*y*", &serials, &ways)) return nullptr;
  std::vector<std::pair<uint64_t, Way>> ranked;
  const auto n = static_cast<size_t>(ways.len);
  const bool fits = static_cast<size_t>(serials.len) == n * sizeof(int64_t);
  for (size_t i = 0; fits && i < n; ++i) {
    int64_t serial;
    std::memcpy(&serial, static_cast<const char*>(serials.buf) + i * sizeof serial, sizeof serial);
    const uint8_t way = static_cast<const uint8_t*>(ways.buf)[i];
    ranked.emplace_back(static_cast<uint64_t>(serial), way <= 2 ? static_cast<Way>(way) : Way::kCheaper);
  }
  PyBuffer_Release(&serials);
  PyBuffer_Release(&ways);
  if (!fits) {
    PyErr_SetString(PyExc_ValueError, "an int64 and a uint8 for each");
    return nullptr;
  }
  Py_BEGIN_ALLOW_THREADS;
  set_ranking(ranked);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

PyObject* py_wait_for_pressure(PyObject*, PyObject*) {
  Py_BEGIN_ALLOW_THREADS;
  wait_for_pressure();
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

PyObject* py_end_wait_for_pressure(PyObject*, PyObject*) {
  end_wait_for_pressure();
  Py_RETURN_NONE;
}

PyMethodDef ranking_methods[] = {
    {"candidates", py_candidates, METH_NOARGS, "what can leave now, in columns"},
    {"set_ranking", py_set_ranking, METH_VARARGS, "set_ranking(serials, ways): who leaves next, and how"},
    {"wait_for_pressure", py_wait_for_pressure, METH_NOARGS, "returns when an order is wanted, or none any more"},
    {"end_wait_for_pressure", py_end_wait_for_pressure, METH_NOARGS, "none is wanted any more"},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool add_ranking_functions(PyObject* module) { return PyModule_AddFunctions(module, ranking_methods) == 0; }

}  // namespace memmgr::pager
