// Errors that cross between C++ and Python.
#pragma once

#include <Python.h>
#include <c10/util/Exception.h>

#include <exception>

namespace memmgr::pager {

// A restored cell has other bytes than it had before: the run must not go on with them (memmgr.RecomputeError).
class WrongBytes : public c10::Error {
 public:
  using c10::Error::Error;
};

// Sets the callable that makes a memmgr.BudgetError of its text, the class memmgr.RecomputeError, and
// torch.OutOfMemoryError. The GIL is held.
void set_error_classes(PyObject* make_budget_error, PyObject* recompute_error, PyObject* out_of_memory_error);

// Called in a catch block. Sets Python's error for the exception.
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

// Returns true if Python's error is torch's for memory that is spent, or memmgr.BudgetError. The GIL is held.
bool python_found_no_room();
// Throws the exception as memmgr.BudgetError if Python runs; returns otherwise. Takes the GIL: the caller has none of
// the pager's locks.
void raise_budget_error(const c10::OutOfMemoryError& e);
void raise_budget_error_of_python();          // for torch's error from an op written in Python
void raise_wrong_bytes(const c10::Error& e);  // throws it as memmgr.RecomputeError

}  // namespace memmgr::pager
