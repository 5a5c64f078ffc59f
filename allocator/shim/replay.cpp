// Runs a recipe again, the usual way: an op that only reads, under the circumstances that there are. Everything else is
// Python's (memmgr/_replay.py), which asks here first.
#include "shim.h"

namespace memmgr {

// A copy of a recipe's arguments with tensors where it has refs; every storage is one of `leases`. Null without an
// error: the op writes to one of them.
static PyObject* with_tensors(PyObject* v) {
  if (Py_TYPE(v) == &RefType) {
    const auto* r = reinterpret_cast<Ref*>(v);
    return r->mutated ? nullptr : tensor_again(r);
  }
  if (!PyList_CheckExact(v) && !PyTuple_CheckExact(v)) return Py_NewRef(v);
  return mapped(v, with_tensors);
}

static PyObject* keywords_with_tensors(PyObject* kwargs) {
  PyObject* copy = PyDict_New();
  PyObject *key, *v;
  Py_ssize_t at = 0;
  while (copy && PyDict_Next(kwargs, &at, &key, &v)) {
    PyObject* item = with_tensors(v);
    if (!item || PyDict_SetItem(copy, key, item) != 0) Py_CLEAR(copy);
    Py_XDECREF(item);
  }
  return copy;
}

static bool flatten(PyObject* out, PyObject* into) {
  if (PyTuple_Check(out) || PyList_Check(out)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(out); ++i)
      if (!flatten(PySequence_Fast_GET_ITEM(out, i), into)) return false;
    return true;
  }
  return PyList_Append(into, impl_of(out) ? out : Py_None) == 0;
}

// run_plain(recipe) -> what it makes, flat; None, and nothing has happened, where it is not as simple as that: it
// draws, writes, fills, ran under other circumstances, or an input is not in memory or not what it was.
static PyObject* py_run_plain(PyObject*, PyObject* o) {
  if (Py_TYPE(o) != &RecipeType) return PyErr_Format(PyExc_TypeError, "run_plain(recipe)");
  auto* r = reinterpret_cast<Recipe*>(o);
  if (r->rng || r->special || r->env != current_environment()) Py_RETURN_NONE;
  // Held until the op has run: making room for what it makes must not take them.
  c10::SmallVector<StorageRef, 8> leases;
  {
    std::lock_guard<std::mutex> lock(g.mu);
    for (int i = 0; i < r->nlinks; ++i) {
      const Cell* c = r->links[i].cell;
      StorageRef s = !c || c->gone != PRESENT ? StorageRef() : c->strong ? c->strong : c->weak.lock();
      if (!s || !data_present(s.get())) break;
      leases.push_back(std::move(s));
    }
  }
  bool good = leases.size() == static_cast<size_t>(r->nlinks);
  for (int i = 0; good && i < r->nlinks; ++i) good = versions_current(r->links[i].cell);  // rule 3
  if (!good) Py_RETURN_NONE;
  PyObject* args = with_tensors(r->args);
  PyObject* kwargs = args && r->kwargs ? keywords_with_tensors(r->kwargs) : nullptr;
  if (!args || (r->kwargs && !kwargs)) {
    Py_XDECREF(args);
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
  }
  if (plan_leads()) plan_settle();  // what the plan lets go and nobody uses any more may go
  PyObject* out = PyObject_Call(r->func, args, kwargs);
  Py_DECREF(args);
  Py_XDECREF(kwargs);
  if (!out) return nullptr;
  PyObject* all = PyList_New(0);
  if (all && !flatten(out, all)) Py_CLEAR(all);
  Py_DECREF(out);
  return all;
}

PyMethodDef replay_methods[] = {
    {"run_plain", py_run_plain, METH_O, "run_plain(recipe) -> what it makes, or None where Python has to"},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace memmgr
