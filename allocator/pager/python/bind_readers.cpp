#include "python/bind_readers.h"

// Functions for readers (rule 9): pins, escapes, threads, functions of extensions, captures.
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <unordered_set>

#include "base/budget.h"
#include "base/errors.h"
#include "base/seen_threads.h"
#include "base/tensors.h"
#include "base/thread_state.h"
#include "cells/adoption.h"
#include "cells/cell.h"
#include "cells/mapped_range.h"
#include "cells/names.h"
#include "cells/types.h"
#include "concurrency/deferred_steps.h"
#include "guards/argument_pins.h"
#include "guards/captures.h"
#include "guards/ddp_reducer.h"
#include "guards/escape.h"
#include "guards/extension_ops.h"
#include "guards/mapped_files.h"
#include "guards/room.h"
#include "guards/stream_guard.h"
#include "python/heartbeat.h"
#include "remat/replay.h"

namespace memmgr::pager {

namespace {

PyObject* py_see_this_thread(PyObject*, PyObject* on) {
  const bool before = thread_is_seen();
  see_this_thread(PyObject_IsTrue(on) == 1);
  return PyBool_FromLong(before);
}

PyObject* py_making_states(PyObject*, PyObject* on) {
  tl_making_states = PyObject_IsTrue(on) == 1;
  Py_RETURN_NONE;
}

// Returns the storages of the tensors and addresses in a list or tuple. Items without a storage are left out.
std::vector<StoragePtr> storages_of(PyObject* items) {
  std::vector<StoragePtr> storages;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items); ++i)
    if (StoragePtr s = storage_of(PySequence_Fast_GET_ITEM(items, i))) storages.push_back(std::move(s));
  return storages;
}

// add_pending(run, tensors) -> True if `run` waits. It is called without arguments before a thread reads or writes one
// of the tensors. Only `run` may hold these under the names that are passed here.
PyObject* py_add_pending(PyObject*, PyObject* args) {
  PyObject *run, *tensors;
  if (!PyArg_ParseTuple(args, "OO!", &run, &PyList_Type, &tensors)) return nullptr;
  return guarded([&] { return PyBool_FromLong(budget.open && add_pending(run, storages_of(tensors))); });
}

PyObject* py_let_slices_wait(PyObject*, PyObject* on) {
  let_slices_wait(PyObject_IsTrue(on) == 1);
  Py_RETURN_NONE;
}

// any_away(tensors) -> True if one of them is absent
PyObject* py_any_away(PyObject*, PyObject* list) {
  if (!PyList_Check(list)) return PyErr_Format(PyExc_TypeError, "any_away() takes a list");
  for (const StoragePtr& s : storages_of(list)) {
    const Cell* c = cell_of(s.get());
    if (c && (c->state.load() & kAbsent)) Py_RETURN_TRUE;
  }
  Py_RETURN_FALSE;
}

// finish_pending([quietly]). quietly: an error is raised where the result is used.
PyObject* py_finish_pending(PyObject*, PyObject* args) {
  int quietly = 0;
  if (!PyArg_ParseTuple(args, "|p", &quietly)) return nullptr;
  return guarded([&]() -> PyObject* {
    finish_all_pending(quietly);
    Py_RETURN_NONE;
  });
}

// name(tensor or cdata) -> the number that replaces its address in comparisons; None: that is the address, which any
// holder of the tensor may take.
PyObject* py_name(PyObject*, PyObject* o) {
  return guarded([&]() -> PyObject* {
    const StoragePtr s = storage_of(o);
    uint64_t name = s ? name_of(s.get()) : 0;
    if (!name) Py_RETURN_NONE;
    if (THPVariable_Check(o)) {
      const at::Tensor& t = THPVariable_Unpack(o);
      name = t.numel() == 0 ? 0 : name + static_cast<uint64_t>(t.storage_offset()) * t.itemsize();
    }
    return PyLong_FromUnsignedLongLong(name);
  });
}

PyObject* py_names_differ(PyObject*, PyObject*) { return PyBool_FromLong(names_differ()); }

PyObject* py_escape(PyObject*, PyObject* args) {
  PyObject* o;
  int why;
  if (!PyArg_ParseTuple(args, "Oi", &o, &why)) return nullptr;
  return guarded([&]() -> PyObject* {
    const StoragePtr s = storage_of(o);
    if (!s || !budget.open) Py_RETURN_FALSE;
    finish_pending_of(s.get());
    PyThreadState* saved = PyEval_SaveThread();
    try {
      Cell* c = cell_of(s.get());
      // The slices of a mapped file become cells. The storage over the whole file becomes one only if an op touches it.
      const bool whole_file = static_cast<Escape>(why) == Escape::kSlice && is_mapped(s.get());
      if (!c && !whole_file && adoptable(s.get())) c = adopt_in_budget(s.get(), tl_depth == 0);
      if (c) escape(c, static_cast<Escape>(why));
    } catch (...) {
      PyEval_RestoreThread(saved);
      throw;
    }
    PyEval_RestoreThread(saved);
    Py_RETURN_TRUE;
  });
}

PyObject* pin_one(PyObject* addressed, bool hardly) {
  PyObject* items = PyTuple_Pack(1, addressed);
  if (!items) return nullptr;
  std::vector<StoragePtr> storages = storages_of(items);
  Py_DECREF(items);
  return new_pin(std::move(storages), false, false, true, hardly);
}

// pin(sequence of tensors or cdatas[, written[, region[, held]]]) -> Pin. held: it outlives this call.
PyObject* py_pin(PyObject*, PyObject* args) {
  PyObject* sequence;
  int written = 0, region = 0, held = 0;
  if (!PyArg_ParseTuple(args, "O|ppp", &sequence, &written, &region, &held)) return nullptr;
  PyObject* items = PySequence_Fast(sequence, "a sequence of tensors or storages' addresses");
  if (!items) return nullptr;
  std::vector<StoragePtr> storages = storages_of(items);
  Py_DECREF(items);
  return new_pin(std::move(storages), written, region, !held);
}

// pin_number(tensor) -> Pin, or None if the tensor is no cell: most numbers are small tensors.
PyObject* py_pin_number(PyObject*, PyObject* o) {
  if (!THPVariable_Check(o)) Py_RETURN_NONE;
  const c10::TensorImpl* t = THPVariable_Unpack(o).unsafeGetTensorImpl();
  if (C10_LIKELY(pending_slices.load(std::memory_order_relaxed) == 0) && t->has_storage() &&
      !cell_of(t->unsafe_storage().unsafeGetStorageImpl()))
    Py_RETURN_NONE;
  return pin_one(o, false);
}

// pin_item(cdata) -> Pin, for a read of one element of the storage.
PyObject* py_pin_item(PyObject*, PyObject* o) { return pin_one(o, true); }

// beat(store, key, seconds) -> True if a thread now reports to the store that this process runs. beat(): it ends.
PyObject* py_beat(PyObject*, PyObject* args) {
  PyObject* store = Py_None;
  const char* key = "";
  double seconds = 0;
  if (!PyArg_ParseTuple(args, "|Osd", &store, &key, &seconds)) return nullptr;
  return guarded([&] {
    end_beat();
    return PyBool_FromLong(store != Py_None && begin_beat(store, key, seconds));
  });
}

PyObject* py_beats(PyObject*, PyObject*) { return PyLong_FromUnsignedLongLong(beats_answered()); }

// pin_reducer(reducer, gradients) -> Pin of the storages that DDP's reducer reads outside of ops; None: it waits for no
// gradient.
PyObject* py_pin_reducer(PyObject*, PyObject* args) {
  PyObject* reducer;
  int gradients;
  if (!PyArg_ParseTuple(args, "Op", &reducer, &gradients)) return nullptr;
  std::vector<StoragePtr> storages = storages_of_reducer(reducer, gradients);
  if (storages.empty()) Py_RETURN_NONE;
  return new_pin(std::move(storages), false, false, false);
}

// reducer_storages(reducer) -> [storage's address]: its buckets, and the gradients of its parameters.
PyObject* py_reducer_storages(PyObject*, PyObject* reducer) {
  const std::vector<StoragePtr> storages = storages_of_reducer(reducer, true);
  PyObject* found = PyList_New(static_cast<Py_ssize_t>(storages.size()));
  if (!found) return nullptr;
  for (size_t i = 0; i < storages.size(); ++i)
    PyList_SET_ITEM(found, static_cast<Py_ssize_t>(i), PyLong_FromVoidPtr(storages[i].get()));
  return found;
}

PyObject* py_moves_gradients(PyObject*, PyObject* reducer) { return PyBool_FromLong(moves_gradients(reducer)); }

// call_foreign(function, args, kwargs) -> the function's result. The function is C++ that is not torch's, and is not
// bound by pybind11.
PyObject* py_call_foreign(PyObject*, PyObject* arguments) {
  PyObject *function, *args, *kwargs;
  if (!PyArg_ParseTuple(arguments, "OO!O!", &function, &PyTuple_Type, &args, &PyDict_Type, &kwargs)) return nullptr;
  return call_foreign(function, args, kwargs);
}

PyObject* py_note_profiler(PyObject*, PyObject* on) {
  const bool runs = PyObject_IsTrue(on) == 1;
  Py_BEGIN_ALLOW_THREADS;
  if (budget.open) note_profiler(runs);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

PyObject* py_guard(PyObject*, PyObject* args) {
  PyObject *functions, *libraries;
  if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &functions, &PyList_Type, &libraries)) return nullptr;
  return guarded([&] {
    Libraries theirs(libraries);
    long found = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(functions); ++i)
      found += guard_function(PyList_GET_ITEM(functions, i), &theirs);
    return PyLong_FromLong(found);
  });
}

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

// forsake_file(path): called before the file is overwritten
PyObject* py_forsake_file(PyObject*, PyObject* path) {
  PyObject* bytes = nullptr;
  if (!PyUnicode_FSConverter(path, &bytes)) return nullptr;
  PyObject* result = guarded([&]() -> PyObject* {
    if (budget.open) {
      PyThreadState* saved = PyEval_SaveThread();
      try {
        forsake_file(PyBytes_AS_STRING(bytes));
      } catch (...) {
        PyEval_RestoreThread(saved);
        throw;
      }
      PyEval_RestoreThread(saved);
    }
    Py_RETURN_NONE;
  });
  Py_DECREF(bytes);
  return result;
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

PyMethodDef reader_methods[] = {
    {"see_this_thread", py_see_this_thread, METH_O, "are the ops of this thread seen (rule 12)? returns what was"},
    {"making_states", py_making_states, METH_O,
     "an optimizer makes its states in this thread (True), or has made them"},
    {"add_pending", py_add_pending, METH_VARARGS,
     "add_pending(run, tensors): it waits until somebody needs one of these"},
    {"let_slices_wait", py_let_slices_wait, METH_O, "may they from here on? What waits already does not end by this"},
    {"any_away", py_any_away, METH_O, "any_away(tensors): are bytes of one of them not in memory?"},
    {"forsake_file", py_forsake_file, METH_O,
     "what is mapped from the file at this path is read: it will be overwritten"},
    {"finish_pending", py_finish_pending, METH_VARARGS, "what was put off and has not run yet runs"},
    {"name", py_name, METH_O, "name(tensor or cdata) -> a number to compare instead of the address, None: the address"},
    {"names_differ", py_names_differ, METH_NOARGS, "has a living storage another name than its address?"},
    {"escape", py_escape, METH_VARARGS, "escape(tensor or cdata, why): its address was handed out for good"},
    {"pin", py_pin, METH_VARARGS, "pin(tensors, written=False, region=False, held=False) -> Pin"},
    {"pin_number", py_pin_number, METH_O, "pin_number(tensor) -> Pin or None"},
    {"pin_item", py_pin_item, METH_O, "pin_item(cdata) -> Pin"},
    {"beat", py_beat, METH_VARARGS, "beat(store, key, seconds): a sign of life that needs no GIL; beat(): no more"},
    {"beats", py_beats, METH_NOARGS, "how many of them the store has answered"},
    {"pin_reducer", py_pin_reducer, METH_VARARGS, "pin_reducer(reducer, gradients) -> Pin or None"},
    {"reducer_storages", py_reducer_storages, METH_O, "addresses of the storages of DDP's buckets and gradients"},
    {"moves_gradients", py_moves_gradients, METH_O, "will it make its buckets anew and copy gradients into them?"},
    {"call_foreign", py_call_foreign, METH_VARARGS, "call_foreign(function, args, kwargs): C++ that is not torch's"},
    {"note_profiler", py_note_profiler, METH_O, "a profiler asks for addresses from here on (True), or not any more"},
    {"guard", py_guard, METH_VARARGS,
     "guard(functions, libraries) -> how many of them pybind11 has bound in these, and nobody guarded yet"},
    {"unguard_all", py_unguard_all, METH_NOARGS, "functions of extensions are as they were, and nobody watches"},
    {"watch_foreign_calls", py_watch_foreign, METH_NOARGS, "ops and autograd functions of extensions are watched"},
    {"libraries_that_use_torch", py_libraries, METH_NOARGS, "paths of the loaded libraries that name c10's symbols"},
    {"reducers_listen", py_reducers_listen, METH_O, "a backward with reducers that wait begins (True) or ends"},
    {"begin_capture", py_begin_capture, METH_NOARGS, "a graph is about to be captured"},
    {"end_capture", py_end_capture, METH_NOARGS, "its capture has ended"},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool add_reader_functions(PyObject* module) {
  return prepare_pins() && PyModule_AddFunctions(module, reader_methods) == 0;
}

}  // namespace memmgr::pager
