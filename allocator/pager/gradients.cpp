#include "gradients.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "budget.h"
#include "module.h"
#include "observe.h"

namespace memmgr::pager {

namespace {

struct Owned {
  PyObject* object;
  explicit Owned(PyObject* o) : object(o) {
    if (!o) PyErr_Clear();
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() { Py_XDECREF(object); }
};

std::string_view text_of(PyObject* o) {
  const char* text = o && PyUnicode_Check(o) ? PyUnicode_AsUTF8(o) : nullptr;
  if (!text) PyErr_Clear();
  return text ? text : "";
}

// Where a thread sleeps until another one, or a peer, has something for it.
bool waits_in(PyObject* frame, std::string_view function) {
  static constexpr std::pair<std::string_view, std::string_view> kWaiting[] = {
      {"threading", "wait"}, {"threading", "_wait_for_tstate_lock"}, {"selectors", "select"}, {"socket", "accept"}};
  const Owned globals(PyObject_GetAttrString(frame, "f_globals"));
  const bool known = globals.object && PyDict_Check(globals.object);
  const std::string_view module = text_of(known ? PyDict_GetItemString(globals.object, "__name__") : nullptr);
  return std::find(std::begin(kWaiting), std::end(kWaiting), std::pair{module, function}) != std::end(kWaiting);
}

// `p.grad = None` is an instruction of a function that names "grad"; setattr(p, name, None) one that names setattr.
bool may_set_gradients(PyCodeObject* code) {
  const Owned names(PyObject_GetAttrString(reinterpret_cast<PyObject*>(code), "co_names"));
  for (Py_ssize_t i = 0; names.object && i < PyTuple_GET_SIZE(names.object); ++i) {
    const std::string_view name = text_of(PyTuple_GET_ITEM(names.object, i));
    if (name == "grad" || name == "setattr" || name == "delattr" || name == "__setattr__" || name == "__delattr__")
      return true;
  }
  return false;
}

Elsewhere does(PyFrameObject* top) {
  Elsewhere found = Elsewhere::kRuns;
  Py_INCREF(top);
  for (PyFrameObject* frame = top; frame;) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const std::string_view function = text_of(code->co_name);
    if (frame == top && waits_in(reinterpret_cast<PyObject*>(frame), function)) found = Elsewhere::kWaits;
    // A backward waits, too: for the engine's threads, for its peers, for a lock of the user's.
    if (function == "_engine_run_backward" || (frame == top && may_set_gradients(code))) found = Elsewhere::kGradients;
    Py_DECREF(code);
    PyFrameObject* next = found == Elsewhere::kGradients ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = next;
  }
  return found;
}

// The gradient of a leaf; an undefined tensor where nobody may look.
const at::Tensor& gradient_of(PyObject* o) {
  static const at::Tensor none;
  if (!THPVariable_Check(o)) return none;
  const at::Tensor& t = THPVariable_Unpack(o);
  return t.defined() && t.is_leaf() && elsewhere() != Elsewhere::kGradients ? t.grad() : none;
}

PyObject* py_others_wait(PyObject*, PyObject*) { return PyBool_FromLong(elsewhere() == Elsewhere::kWaits); }

// Torch 2.13 destroys the heap where another thread begins a backward while objects of Python's are made of its
// gradients.
PyObject* py_gradients_of(PyObject*, PyObject* tensors) {
  if (!PyList_Check(tensors)) return PyErr_Format(PyExc_TypeError, "gradients_of() takes a list");
  PyObject* found = PyList_New(0);
  if (elsewhere() != Elsewhere::kWaits) return found;
  for (Py_ssize_t i = 0; found && i < PyList_GET_SIZE(tensors); ++i) {
    PyObject* o = PyList_GET_ITEM(tensors, i);
    if (!PyType_IsSubtype(Py_TYPE(o), reinterpret_cast<PyTypeObject*>(THPVariableClass))) continue;  // asks no object
    const at::Tensor& t = THPVariable_Unpack(o);
    if (!t.defined() || !t.is_leaf() || !t.grad().defined()) continue;
    PyObject* gradient = THPVariable_Wrap(t.grad());
    if (!gradient || PyList_Append(found, gradient) < 0) Py_CLEAR(found);
    Py_XDECREF(gradient);
  }
  return found;
}

PyObject* py_gradient_info(PyObject*, PyObject* o) { return info_of_storage(gradient_of(o)); }

PyObject* py_gradient_bytes(PyObject*, PyObject* o) {
  const at::Tensor& gradient = gradient_of(o);
  return PyLong_FromUnsignedLongLong(gradient.defined() ? gradient.numel() * gradient.itemsize() : 0);
}

}  // namespace

Elsewhere elsewhere() {
  PyThreadState* const mine = PyThreadState_Get();
  PyThreadState* const first = PyInterpreterState_ThreadHead(PyThreadState_GetInterpreter(mine));
  if (first == mine && !PyThreadState_Next(first)) return Elsewhere::kWaits;
  // A collection here would run what objects have to say at their end, and let other threads go on.
  const int collects = PyGC_Disable();
  Elsewhere found = Elsewhere::kWaits;
  const Owned frames(PyObject_CallNoArgs(PySys_GetObject("_current_frames")));
  const Owned own(PyLong_FromUnsignedLong(PyThread_get_thread_ident()));
  PyObject *thread, *top;
  for (Py_ssize_t at = 0; frames.object && own.object && PyDict_Next(frames.object, &at, &thread, &top);)
    if (PyObject_RichCompareBool(thread, own.object, Py_EQ) == 0)
      found = std::max(found, does(reinterpret_cast<PyFrameObject*>(top)));
  if (collects) PyGC_Enable();
  return frames.object && own.object ? found : Elsewhere::kGradients;
}

PyMethodDef gradient_methods[] = {
    {"others_wait", py_others_wait, METH_NOARGS, "does every other thread wait for somebody?"},
    {"gradients_of", py_gradients_of, METH_O, "gradients_of(tensors): of the leaves, where others_wait()"},
    {"gradient_info", py_gradient_info, METH_O, "gradient_info(tensor): storage_info of its gradient"},
    {"gradient_bytes", py_gradient_bytes, METH_O, "gradient_bytes(tensor): 0 while nobody may look, too"},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace memmgr::pager
