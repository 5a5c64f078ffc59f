// Sections that Python enters with `with` and that end whatever happens in them. An interrupt (Ctrl-C) comes between
// two bytecodes, so also where an __enter__ or __exit__ in Python has done half of its work, or nothing yet. These are
// one step.
#include "shim.h"

namespace memmgr {

namespace {

// As an op was recorded: below autograd and autocast, no mode, no layer of a functorch transform, no gradient (rule 5).
struct Below {
  PyObject_HEAD;
  c10::DispatchKeySet added;  // keys that this section switched off
  bool grad, recomputing, was_recomputing, inside;
};

// Calls what it was given, at its end.
struct Finally {
  PyObject_HEAD;
  PyObject* call;
};

PyObject* Below_new(PyTypeObject* type, PyObject* args, PyObject* kw) {
  static const char* names[] = {"recomputing", nullptr};
  int recomputing = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "|p", const_cast<char**>(names), &recomputing)) return nullptr;
  auto* self = reinterpret_cast<Below*>(type->tp_alloc(type, 0));
  if (self) self->recomputing = recomputing != 0;
  return reinterpret_cast<PyObject*>(self);
}

PyObject* Below_enter(PyObject* o, PyObject*) {
  auto* self = reinterpret_cast<Below*>(o);
  if (self->inside) return PyErr_Format(PyExc_RuntimeError, "memmgr: a section is entered twice");
  using K = c10::DispatchKey;
  auto tls = c10::impl::tls_local_dispatch_key_set();
  // A backward may run inside vmap (is_grads_batched, torch.func.vmap over a backward); the recorded op did not.
  constexpr c10::DispatchKeySet transforms({K::FuncTorchDynamicLayerFrontMode, K::FuncTorchDynamicLayerBackMode,
                                            K::FuncTorchBatched, K::FuncTorchVmapMode, K::FuncTorchGradWrapper,
                                            K::Batched, K::VmapMode});
  const auto off = c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset |
                   c10::DispatchKeySet({K::Python, K::PreDispatch, K::PythonTLSSnapshot}) | transforms;
  self->added = off - tls.excluded_;
  self->grad = c10::GradMode::is_enabled();
  self->was_recomputing = tl_recomputing;
  self->inside = true;
  tls.excluded_ = tls.excluded_ | off;
  c10::impl::_force_tls_local_dispatch_key_set(tls);
  c10::GradMode::set_enabled(false);
  if (self->recomputing) {
    tl_recomputing = true;
    tl_refused_floor = 0;
  }
  Py_RETURN_NONE;
}

PyObject* Below_exit(PyObject* o, PyObject*) {
  auto* self = reinterpret_cast<Below*>(o);
  if (!self->inside) Py_RETURN_FALSE;
  self->inside = false;
  auto tls = c10::impl::tls_local_dispatch_key_set();
  tls.excluded_ = tls.excluded_ - self->added;
  c10::impl::_force_tls_local_dispatch_key_set(tls);
  c10::GradMode::set_enabled(self->grad);
  tl_recomputing = self->was_recomputing;
  Py_RETURN_FALSE;
}

PyObject* Finally_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* call;
  if (!PyArg_ParseTuple(args, "O", &call)) return nullptr;
  auto* self = reinterpret_cast<Finally*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  Py_INCREF(call);
  self->call = call;
  return reinterpret_cast<PyObject*>(self);
}

void Finally_dealloc(PyObject* o) {
  Py_CLEAR(reinterpret_cast<Finally*>(o)->call);
  Py_TYPE(o)->tp_free(o);
}

PyObject* Finally_enter(PyObject*, PyObject*) { Py_RETURN_NONE; }

PyObject* Finally_exit(PyObject* o, PyObject*) {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;  // of an interrupt that came meanwhile
  for (int i = 0; i < 100; ++i) {
    if (PyObject* done = PyObject_CallNoArgs(reinterpret_cast<Finally*>(o)->call)) {
      Py_DECREF(done);
      if (!type) Py_RETURN_FALSE;
      break;
    }
    Py_CLEAR(type);
    Py_CLEAR(value);
    Py_CLEAR(trace);
    // An error of its own is an error; an interrupt waits until it is done.
    if (PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;
    PyErr_Fetch(&type, &value, &trace);
  }
  PyErr_Restore(type, value, trace);
  return nullptr;
}

PyMethodDef Below_methods[] = {{"__enter__", Below_enter, METH_NOARGS, nullptr},
                               {"__exit__", Below_exit, METH_VARARGS, nullptr},
                               {nullptr, nullptr, 0, nullptr}};
PyMethodDef Finally_methods[] = {{"__enter__", Finally_enter, METH_NOARGS, nullptr},
                                 {"__exit__", Finally_exit, METH_VARARGS, nullptr},
                                 {nullptr, nullptr, 0, nullptr}};

PyTypeObject BelowType = {PyVarObject_HEAD_INIT(nullptr, 0)};
PyTypeObject FinallyType = {PyVarObject_HEAD_INIT(nullptr, 0)};

bool add_type(PyObject* m, PyTypeObject* type, const char* name, size_t size, newfunc make, PyMethodDef* methods) {
  type->tp_name = name;
  type->tp_basicsize = static_cast<Py_ssize_t>(size);
  type->tp_flags = Py_TPFLAGS_DEFAULT;
  type->tp_new = make;
  type->tp_methods = methods;
  return PyModule_AddType(m, type) == 0;
}

}  // namespace

bool ready_sections(PyObject* m) {
  BelowType.tp_doc = "Below(recomputing=False): below autograd and autocast, no mode, no transform, no gradient";
  FinallyType.tp_doc = "Finally(callable): calls it at the end, again if an interrupt came in it";
  FinallyType.tp_dealloc = Finally_dealloc;
  return add_type(m, &BelowType, "memmgr._native.Below", sizeof(Below), Below_new, Below_methods) &&
         add_type(m, &FinallyType, "memmgr._native.Finally", sizeof(Finally), Finally_new, Finally_methods);
}

}  // namespace memmgr
