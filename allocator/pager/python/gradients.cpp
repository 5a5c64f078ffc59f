#include "python/gradients.h"

#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <string>

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

void py_sleeps_in(Callable function) { sleeps_in(function.object); }
void py_sets_gradients_in(Callable function) { sets_gradients_in(function.object); }

bool py_others_wait() { return elsewhere() == Elsewhere::kWaits; }

bool py_raise_in(unsigned long thread, ExceptionType exception, const std::string& package) {
  return raise_in(thread, exception.object, package);
}

// Torch 2.13 corrupts the heap if another thread begins a backward while Python objects are made of its gradients.
TensorList py_gradients_of(TensorList tensors) {
  THPObjectPtr found(checked(PyList_New(0)));
  const NoCollection meanwhile;
  if (elsewhere() == Elsewhere::kWaits)
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors.object); ++i) {
      PyObject* o = PyList_GET_ITEM(tensors.object, i);
      // Runs no code of the object.
      if (!PyType_IsSubtype(Py_TYPE(o), reinterpret_cast<PyTypeObject*>(THPVariableClass))) continue;
      const at::Tensor& t = THPVariable_Unpack(o);
      if (!t.defined() || !t.is_leaf() || !t.grad().defined()) continue;
      THPObjectPtr gradient(checked(THPVariable_Wrap(t.grad())));
      if (PyList_Append(found.get(), gradient.get()) != 0) throw python_error();
    }
  TensorList all;
  all.object = found.release();
  return all;
}

std::optional<StorageInfo> py_gradient_info(Tensor o) { return info_of_storage(gradient_of(o.object)); }

uint64_t py_gradient_bytes(Tensor o) {
  const at::Tensor& gradient = gradient_of(o.object);
  return gradient.defined() ? gradient.numel() * gradient.itemsize() : 0;
}

}  // namespace

void bind_gradients(Module& m) {
  m.def<&py_sleeps_in>(
      "sleeps_in", "function",
      "A thread whose innermost frame runs this function sleeps until another thread, or a peer, wakes "
      "it.");
  m.def<&py_sets_gradients_in>("sets_gradients_in", "function",
                               "A thread that has this function among its frames sets gradients.");
  m.def<&py_others_wait>("others_wait", "", "True: every other thread waits for a thread or a peer.");
  m.def<&py_raise_in>("raise_in", "thread, exception, package",
                      "Raises the exception in the thread if a function of the package runs there. True: it did.");
  m.def<&py_gradients_of>("gradients_of", "tensors", "The gradients of the leaves among them, if others_wait().");
  m.def<&py_gradient_info>("gradient_info", "tensor",
                           "`storage_info` of its gradient; None, too, while another thread puts gradients in place.");
  m.def<&py_gradient_bytes>("gradient_bytes", "tensor", "0, too, while another thread puts gradients in place.");
}

}  // namespace memmgr::pager
