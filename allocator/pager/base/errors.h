// Errors that cross between C++ and Python.
#pragma once

#include <Python.h>
#include <c10/util/Exception.h>

#include <exception>

namespace memmgr::pager {

// Bytes came back other than they left: the run must not go on with them (memmgr.RecomputeError).
class WrongBytes : public c10::Error {
 public:
  using c10::Error::Error;
};

// The callable that makes a memmgr.BudgetError of its text, the class memmgr.RecomputeError, and
// torch.OutOfMemoryError. The GIL is held.
void set_error_classes(PyObject* make_budget_error, PyObject* recompute_error, PyObject* out_of_memory_error);

// In a catch block: what was thrown becomes Python's error of the same meaning.
void set_python_error();
template <class F>
PyObject* guarded(F&& body) {
  try {
    return body();
  } catch (const std::exception&) {
    set_python_error();
  }
  return nullptr;
}

// Throws it as memmgr.BudgetError, if there is a Python to say so; else returns. Takes the GIL: nothing of ours is
// held.
void raise_budget_error(const c10::OutOfMemoryError& e);
void raise_budget_error_of_python();          // the same, where an op written in Python has ended with torch's error
void raise_wrong_bytes(const c10::Error& e);  // the same, as memmgr.RecomputeError

}  // namespace memmgr::pager
