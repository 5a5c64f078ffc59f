#include "base/gil.h"

namespace memmgr::pager {

WithoutGil::WithoutGil() {
  if (Py_IsInitialized() && PyGILState_Check()) saved_ = PyEval_SaveThread();
}
WithoutGil::~WithoutGil() noexcept(false) {
  if (saved_) PyEval_RestoreThread(saved_);
}

// Sets Dynamo's callback that compiles this thread's frames; None: they are not compiled. Returns the one before.
static PyObject* compile_frames_with(PyObject* callback) {
  PyObject* dynamo = PyImport_ImportModule("torch._C._dynamo.eval_frame");
  PyObject* before = dynamo ? PyObject_CallMethod(dynamo, "set_eval_frame", "O", callback) : nullptr;
  if (!before) PyErr_Clear();
  Py_XDECREF(dynamo);
  return before;
}

NotCompiled::NotCompiled() : before_(compile_frames_with(Py_None)) {}

NotCompiled::~NotCompiled() {
  if (before_ && before_ != Py_None) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Py_XDECREF(compile_frames_with(before_));
    PyErr_Restore(type, value, trace);
  }
  Py_XDECREF(before_);
}

}  // namespace memmgr::pager
