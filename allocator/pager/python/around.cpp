#include "python/around.h"

#include <cstddef>

namespace memmgr::pager {

namespace {

namespace around {

struct Object {
  PyObject_HEAD  //
      vectorcallfunc call;
  PyObject *original, *enter, *attributes, *references;
};

Object* cast(PyObject* self) { return reinterpret_cast<Object*>(self); }

// Ends a call: consumes `result` (null: the error is set) and `held`, and returns the call's result.
PyObject* leave(PyObject* result, PyObject* held) {
  python_error error;  // kept here while other code of Python runs
  if (!result) {
    PyErr_Fetch(&error.type, &error.value, &error.traceback);
    PyErr_NormalizeException(&error.type, &error.value, &error.traceback);
    if (error.traceback) PyException_SetTraceback(error.value, error.traceback);
  }
  PyObject* answer = PyCallable_Check(held) ? PyObject_CallFunctionObjArgs(held, result ? result : Py_None,
                                                                           error.value ? error.value : Py_None, nullptr)
                                            : Py_NewRef(Py_None);
  Py_DECREF(held);
  if (answer)
    error.restore();
  else
    Py_CLEAR(result);  // the error of `held` is raised in the place of either
  Py_XDECREF(answer);
  return result;
}

PyObject* call(PyObject* object, PyObject* const* args, size_t flags, PyObject* names) {
  // The object may be deleted meanwhile: the patch of a budget that closes.
  PyObject *enter = Py_NewRef(cast(object)->enter), *original = Py_NewRef(cast(object)->original);
  const size_t count = static_cast<size_t>(PyVectorcall_NARGS(flags));
  PyObject* held = PyObject_Vectorcall(enter, args, count, names);
  PyObject* result = held ? leave(PyObject_Vectorcall(original, args, count, names), held) : nullptr;
  Py_DECREF(enter);
  Py_DECREF(original);
  return result;
}

PyObject* bound(PyObject* self, PyObject* object, PyObject*) {
  return object && object != Py_None ? PyMethod_New(self, object) : Py_NewRef(self);
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(cast(self)->original);
  Py_VISIT(cast(self)->enter);
  Py_VISIT(cast(self)->attributes);
  return 0;
}

int clear(PyObject* self) {
  Py_CLEAR(cast(self)->original);
  Py_CLEAR(cast(self)->enter);
  Py_CLEAR(cast(self)->attributes);
  return 0;
}

void release(PyObject* self) {
  PyObject_GC_UnTrack(self);
  if (cast(self)->references) PyObject_ClearWeakRefs(self);
  clear(self);
  PyObject_GC_Del(self);
}

// As a function of Python: pickled by its name, and its own copy.
PyObject* reduce(PyObject* self, PyObject*) { return PyObject_GetAttrString(self, "__qualname__"); }

PyMethodDef methods[] = {{"__reduce__", reduce, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyGetSetDef members[] = {{"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
                         {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject type_of_calls = [] {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0) "memmgr._pager.Around"};
  type.tp_basicsize = sizeof(Object);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR;
  type.tp_vectorcall_offset = offsetof(Object, call);
  type.tp_dictoffset = offsetof(Object, attributes);
  type.tp_weaklistoffset = offsetof(Object, references);
  type.tp_call = PyVectorcall_Call;
  type.tp_descr_get = bound;
  type.tp_traverse = traverse;
  type.tp_clear = clear;
  type.tp_dealloc = release;
  type.tp_methods = methods;
  type.tp_getset = members;
  return type;
}();

}  // namespace around

Callable py_around(Callable original, Callable enter) {
  if (PyType_Ready(&around::type_of_calls) != 0) throw python_error();
  auto* self = PyObject_GC_New(around::Object, &around::type_of_calls);
  if (!self) throw python_error();
  self->call = around::call;
  self->original = Py_NewRef(original.object);
  self->enter = Py_NewRef(enter.object);
  self->attributes = self->references = nullptr;
  PyObject_GC_Track(reinterpret_cast<PyObject*>(self));
  THPObjectPtr made(reinterpret_cast<PyObject*>(self));
  THPObjectPtr functools(checked(PyImport_ImportModule("functools")));
  THPObjectPtr named(
      checked(PyObject_CallMethod(functools.get(), "update_wrapper", "OO", made.get(), original.object)));
  Callable result;
  result.object = made.release();
  return result;
}

}  // namespace

void bind_around(Module& m) {
  m.def<&py_around>("around", "original, enter",
                    "A callable in the place of `original`, without a frame of its own: it calls `enter` with its "
                    "arguments first. A callable result of `enter` is called with the result and the error at the "
                    "end, any other is kept until then.");
}

}  // namespace memmgr::pager
