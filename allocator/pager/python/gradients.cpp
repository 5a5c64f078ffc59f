#include "python/gradients.h"

#include <torch/csrc/autograd/python_variable.h>

#include "base/gil.h"
#include "concurrency/python_threads.h"
#include "python/introspection.h"

namespace memmgr::pager {

namespace {

// Returns the gradient of a leaf; an undefined tensor if no thread may read it now. Most tensors never had one: they
// need no check of other threads.
const at::Tensor& gradient_of(PyObject* o) {
  static const at::Tensor none;
  if (!THPVariable_Check(o)) return none;
  const at::Tensor& t = THPVariable_Unpack(o);
  const bool may_have = t.defined() && t.unsafeGetTensorImpl()->autograd_meta() && t.is_leaf();
  return may_have && elsewhere() != Elsewhere::kGradients ? t.grad() : none;
}

PyObject* py_others_wait(PyObject*, PyObject*) { return PyBool_FromLong(elsewhere() == Elsewhere::kWaits); }

PyObject* py_raise_in(PyObject*, PyObject* args) {
  unsigned long thread;
  PyObject* exception;
  const char* package;
  if (!PyArg_ParseTuple(args, "kOs", &thread, &exception, &package)) return nullptr;
  return PyBool_FromLong(raise_in(thread, exception, package));
}

// Torch 2.13 corrupts the heap if another thread begins a backward while Python objects are made of its gradients.
PyObject* py_gradients_of(PyObject*, PyObject* tensors) {
  if (!PyList_Check(tensors)) return PyErr_Format(PyExc_TypeError, "gradients_of() takes a list");
  PyObject* found = PyList_New(0);
  const NoCollection meanwhile;
  if (elsewhere() != Elsewhere::kWaits) return found;
  for (Py_ssize_t i = 0; found && i < PyList_GET_SIZE(tensors); ++i) {
    PyObject* o = PyList_GET_ITEM(tensors, i);
    // Runs no code of the object.
    if (!PyType_IsSubtype(Py_TYPE(o), reinterpret_cast<PyTypeObject*>(THPVariableClass))) continue;
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

PyMethodDef gradient_methods[] = {
    {"others_wait", py_others_wait, METH_NOARGS, "does every other thread wait for somebody?"},
    {"raise_in", py_raise_in, METH_VARARGS,
     "raise_in(thread, exception, package) -> was it raised there? Only where a function of the package's runs"},
    {"gradients_of", py_gradients_of, METH_O, "gradients_of(tensors): of the leaves, where others_wait()"},
    {"gradient_info", py_gradient_info, METH_O, "gradient_info(tensor): storage_info of its gradient"},
    {"gradient_bytes", py_gradient_bytes, METH_O, "gradient_bytes(tensor): 0 while nobody may look, too"},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace memmgr::pager
