// The module: callbacks, switches, method tables.
#include "shim.h"

namespace memmgr {

// ---- set-up ----

static PyObject* configure(PyObject*, PyObject* args, PyObject* kwargs) {
  (void)args;
  if (!kwargs) Py_RETURN_NONE;
  PyObject *key, *v;
  Py_ssize_t pos = 0;
  while (PyDict_Next(kwargs, &pos, &key, &v)) {
    const char* name = PyUnicode_AsUTF8(key);
    PyObject** where = nullptr;
#define FIELD(f) \
  if (!std::strcmp(name, #f)) where = &g.f;
    FIELD(on_slow)
    FIELD(on_new_kind)
    FIELD(on_classify)
    FIELD(on_missing)
    FIELD(on_rank)
    FIELD(on_kept)
    FIELD(on_empty)
    FIELD(on_oom)
    FIELD(on_retry)
    FIELD(on_progress)
    FIELD(mode_class)
#undef FIELD
    if (!std::strcmp(name, "on_pack_other")) where = &on_pack_other;
    if (!std::strcmp(name, "on_unpack_other")) where = &on_unpack_other;
    if (!std::strcmp(name, "out_of_memory_type")) where = &out_of_memory_type;
    if (!where) return PyErr_Format(PyExc_TypeError, "configure: unknown callback %s", name);
    PyObject* fresh = v == Py_None ? nullptr : v;
    Py_XINCREF(fresh);
    Py_XSETREF(*where, fresh);
  }
  Py_RETURN_NONE;
}

static PyObject* py_set_always_rank(PyObject*, PyObject* o) {
  g.always_rank = PyObject_IsTrue(o) == 1;
  Py_RETURN_NONE;
}

static PyObject* py_set_active(PyObject*, PyObject* o) {
  g.active = PyObject_IsTrue(o) == 1;
  Py_RETURN_NONE;
}

static PyObject* py_environment(PyObject*, PyObject*) { return PyLong_FromLong(current_environment()); }

static PyObject* py_environment_values(PyObject*, PyObject* o) {
  const auto i = static_cast<size_t>(PyLong_AsLong(o));
  if (i >= g.environments.size()) return PyErr_Format(PyExc_IndexError, "no such environment");
  const auto& e = g.environments[i];
  PyObject* t = PyTuple_New(static_cast<Py_ssize_t>(e.size()));
  for (size_t k = 0; t && k < e.size(); ++k) PyTuple_SET_ITEM(t, static_cast<Py_ssize_t>(k), PyLong_FromLongLong(e[k]));
  return t;
}

static PyObject* py_forget_op(PyObject*, PyObject*) {
  for (auto& [f, info] : g.ops) {
    Py_DECREF(info->func);
    Py_DECREF(info->call);
    for (PyObject* k : info->written_kwargs) Py_DECREF(k);
    delete info;
  }
  g.ops.clear();
  Py_RETURN_NONE;
}

static PyObject* py_forget_kinds(PyObject*, PyObject*) {
  for (auto& [h, k] : g.kinds) k->trust.store(TRUST_NEW);  // recipes may still point at them
  Py_RETURN_NONE;
}

static PyObject* py_kinds(PyObject*, PyObject*) {
  PyObject* list = PyList_New(0);
  for (auto& [h, k] : g.kinds) {
    PyObject* item = Py_BuildValue("Oi", k->func, static_cast<int>(k->trust.load()));
    PyList_Append(list, item);
    Py_XDECREF(item);
  }
  return list;
}

static PyObject* py_clock(PyObject*, PyObject*) { return PyFloat_FromDouble(g.clock); }

static PyObject* py_table_size(PyObject*, PyObject*) {
  return Py_BuildValue("nn", static_cast<Py_ssize_t>(g.table.size()), static_cast<Py_ssize_t>(g.kinds.size()));
}

static PyObject* py_find_payload(PyObject*, PyObject* o) {
  if (!find_payload(o)) return nullptr;
  Py_RETURN_NONE;
}

PyMethodDef recorder_methods[] = {
    {"dispatch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&dispatch)), METH_FASTCALL,
     "__torch_dispatch__ of the recorder"},
    {"record", py_record, METH_VARARGS, "record(func, args, kwargs) -> Recipe or None"},
    {"call", py_call, METH_VARARGS, "call(recipe, callable, args, kwargs, retry=False): run and time"},
    {"call_drawn", py_call_drawn, METH_VARARGS,
     "call_drawn(drawn, callable, args, kwargs): run; once more from where it began to draw if there was no room"},
    {"adopt", py_adopt, METH_VARARGS, "adopt(recipe, outputs)"},
    {"after_op", py_after_op, METH_NOARGS, ""},
    {"pack", pack, METH_O, "pack hook"},
    {"unpack", unpack, METH_O, "unpack hook"},
    {"configure", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&configure)), METH_VARARGS | METH_KEYWORDS,
     "set callbacks"},
    {"set_active", py_set_active, METH_O, "whether ops are recorded and saved tensors get handles"},
    {"set_always_rank", py_set_always_rank, METH_O, "ask the policy after every op (torture)"},
    {"environment", py_environment, METH_NOARGS, "id of the current numeric switches"},
    {"environment_values", py_environment_values, METH_O, ""},
    {"forget_ops", py_forget_op, METH_NOARGS, ""},
    {"forget_kinds", py_forget_kinds, METH_NOARGS, ""},
    {"kinds", py_kinds, METH_NOARGS, "[(op, trust)]"},
    {"clock", py_clock, METH_NOARGS, "virtual time in seconds"},
    {"table_size", py_table_size, METH_NOARGS, ""},
    {"find_payload", py_find_payload, METH_O, ""},
    {nullptr, nullptr, 0, nullptr}};

static PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, "_native", "memmgr's torch-facing shim", -1, nullptr, nullptr, nullptr, nullptr, nullptr};

}  // namespace memmgr

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__native() {
  PyObject* m = PyModule_Create(&memmgr::module_def);
  if (!m) return nullptr;
  if (!memmgr::ready_types(m) || !memmgr::ready_sections(m) || PyModule_AddFunctions(m, memmgr::recorder_methods) < 0 ||
      PyModule_AddFunctions(m, memmgr::cell_functions) < 0 || PyModule_AddFunctions(m, memmgr::bits_functions) < 0 ||
      PyModule_AddFunctions(m, memmgr::vault_methods) < 0 || PyModule_AddFunctions(m, memmgr::window_methods) < 0 ||
      PyModule_AddFunctions(m, memmgr::watch_methods) < 0 || PyModule_AddFunctions(m, memmgr::plan_methods) < 0 ||
      PyModule_AddFunctions(m, memmgr::trace_methods) < 0 || PyModule_AddFunctions(m, memmgr::replay_methods) < 0) {
    Py_DECREF(m);
    return nullptr;
  }
  // As a method: torch insists that a mode's __torch_dispatch__ is bound to the mode.
  PyObject* function = PyObject_GetAttrString(m, "dispatch");
  PyObject* method = function ? PyInstanceMethod_New(function) : nullptr;
  Py_XDECREF(function);
  if (!method || PyModule_AddObject(m, "dispatch", method) < 0) {
    Py_XDECREF(method);
    Py_DECREF(m);
    return nullptr;
  }
  return m;
}
