#include "base/errors.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <string>

#include "base/gil.h"

namespace memmgr::pager {

namespace {

PyObject* make_budget_error = nullptr;  // (text) -> the exception to raise
PyObject* recompute_error = nullptr;    // the class memmgr.RecomputeError
PyObject* torchs_error = nullptr;       // torch.OutOfMemoryError

void set_out_of_memory(const char* text) {
  const NotCompiled not_compiled;
  PyObject* error = make_budget_error ? PyObject_CallFunction(make_budget_error, "s", text) : nullptr;
  if (error)
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
  else if (!PyErr_Occurred())
    PyErr_SetString(PyExc_MemoryError, text);
  Py_XDECREF(error);
}

}  // namespace

void set_error_classes(PyObject* make, PyObject* wrong, PyObject* torchs) {
  Py_XSETREF(torchs_error, Py_NewRef(torchs));
  Py_XSETREF(make_budget_error, Py_NewRef(make));
  Py_XSETREF(recompute_error, Py_NewRef(wrong));
}

bool python_found_no_room() { return torchs_error && PyErr_Occurred() && PyErr_ExceptionMatches(torchs_error); }

void set_python_error() {
  try {
    throw;
  } catch (const c10::OutOfMemoryError& e) {
    set_out_of_memory(e.what_without_backtrace());
  } catch (python_error& e) {
    e.restore();
  } catch (const WrongBytes& e) {
    PyErr_SetString(recompute_error ? recompute_error : PyExc_RuntimeError, e.what_without_backtrace());
  } catch (const c10::Error& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what_without_backtrace());
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  }
}

// Throws the error that `set` raises in Python, in the form in which torch passes such errors on. `text` is its text
// for C++: Python's may take long to write, and most programs that catch the error do not read it.
template <class F>
[[noreturn]] static void throw_python(const std::string& text, F&& set) {
  const PyGILState_STATE gil = PyGILState_Ensure();
  set();
  python_error error;
  PyErr_Fetch(&error.type, &error.value, &error.traceback);
  error.message = text;
  PyGILState_Release(gil);
  throw error;
}

void raise_budget_error(const c10::OutOfMemoryError& e) {
  if (!Py_IsInitialized() || !make_budget_error) return;
  const std::string text = e.what_without_backtrace();
  throw_python(text, [&] { set_out_of_memory(text.c_str()); });
}

void raise_budget_error_of_python() {
  if (!Py_IsInitialized() || !make_budget_error) return;
  const pybind11::gil_scoped_acquire gil;
  std::string text;
  try {
    throw;
  } catch (pybind11::error_already_set& e) {
    if (e.type().ptr() != torchs_error) return;  // memmgr's own is a subclass
    text = pybind11::str(e.value());
  } catch (...) {
    return;
  }
  throw_python(text, [&] { set_out_of_memory(text.c_str()); });
}

void raise_wrong_bytes(const c10::Error& e) {
  if (!Py_IsInitialized() || !recompute_error) return;
  const std::string text = e.what_without_backtrace();
  throw_python(text, [&] { PyErr_SetString(recompute_error, text.c_str()); });
}

}  // namespace memmgr::pager
