#include "guards/address_exports.h"

#include <Python.h>
#include <torch/csrc/autograd/python_variable.h>

#include "base/errors.h"
#include "base/session.h"
#include "base/tensors.h"
#include "base/thread_state.h"
#include "cells/adoption.h"
#include "cells/cell.h"
#include "cells/types.h"
#include "guards/escape.h"
#include "guards/room.h"

namespace memmgr::pager {

namespace {

constexpr int kFlags = METH_VARARGS | METH_KEYWORDS;

struct Export {
  const char* name;  // in torch._C
  PyCFunctionWithKeywords ours;
  PyMethodDef* definition = nullptr;
  PyCFunction original = nullptr;
};

template <int N>
PyObject* exported(PyObject* self, PyObject* args, PyObject* kwargs);

// Python calls the functions without an argument of their own. Guarded by the GIL.
Session* session_of_exports = nullptr;  // whose budget was the last to watch them

Export exports[] = {{"_to_dlpack", &exported<0>}, {"_to_dlpack_versioned", &exported<1>}};

// Returns false with Python's error set.
bool escape_first(PyObject* args) {
  PyObject* o = PyTuple_GET_SIZE(args) > 0 ? PyTuple_GET_ITEM(args, 0) : nullptr;
  if (!o || !session_of_exports->open || !THPVariable_Check(o)) return true;
  const at::Tensor& t = THPVariable_Unpack(o);
  if (!t.defined() || !t.unsafeGetTensorImpl()->has_storage()) return true;
  const auto s = StoragePtr::reclaim_copy(t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  PyThreadState* saved = PyEval_SaveThread();
  try {
    Cell* c = cell_of(s.get());
    if (!c && adoptable(*session_of_exports, s.get())) c = adopt_in_budget(*session_of_exports, s.get(), tl_depth == 0);
    if (c) escape(c, Escape::kDlpack);
  } catch (const std::exception&) {
    PyEval_RestoreThread(saved);
    set_python_error();
    return false;
  }
  PyEval_RestoreThread(saved);
  return true;
}

template <int N>
PyObject* exported(PyObject* self, PyObject* args, PyObject* kwargs) {
  if (!escape_first(args)) return nullptr;
  return reinterpret_cast<PyCFunctionWithKeywords>(reinterpret_cast<void (*)()>(exports[N].original))(self, args,
                                                                                                      kwargs);
}

}  // namespace

void watch_exports(Session& session, bool on) {
  session_of_exports = &session;
  PyObject* torch = PyImport_ImportModule("torch._C");
  for (Export& e : exports) {
    PyObject* f = torch ? PyObject_GetAttrString(torch, e.name) : nullptr;
    // Python's wrappers may surround the function. All names for it share its definition.
    while (f && !PyCFunction_Check(f) && PyObject_HasAttrString(f, "__wrapped__"))
      Py_SETREF(f, PyObject_GetAttrString(f, "__wrapped__"));
    PyMethodDef* d = f && PyCFunction_Check(f) ? reinterpret_cast<PyCFunctionObject*>(f)->m_ml : nullptr;
    Py_XDECREF(f);
    if (on && d && d->ml_flags == kFlags && !e.definition) {
      e.definition = d;
      e.original = d->ml_meth;
      d->ml_meth = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(e.ours));
    } else if (!on && e.definition) {
      e.definition->ml_meth = e.original;
      e.definition = nullptr;
    }
  }
  Py_XDECREF(torch);
  PyErr_Clear();
}

}  // namespace memmgr::pager
