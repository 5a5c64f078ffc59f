#include "guards/extension_ops.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <dlfcn.h>
#include <link.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/clock.h"
#include "base/errors.h"
#include "base/lock.h"
#include "base/no_destructor.h"
#include "base/private_member.h"
#include "base/seen_threads.h"
#include "base/thread_state.h"
#include "cells/lifetime.h"
#include "cells/version.h"
#include "concurrency/deferred_steps.h"
#include "guards/argument_pins.h"
#include "ops/op_info.h"
#include "residency/restore.h"

namespace memmgr::pager {

ForeignScope::ForeignScope() : outer_(tl_foreign) { tl_foreign = this; }

ForeignScope::~ForeignScope() {
  tl_foreign = outer_;
  Trash trash;
  const Hold lock(graph_lock());
  for (const WeakStorage& weak : kept_) {
    // A storage that has ended has no cell, and a cell of a later budget has another serial.
    Cell* c = cell_of(weak._unsafe_get_target());
    if (!c || !serials_.count(c->serial) || c->standing_pins == 0) continue;
    stand_unpinned_locked(c);
    if (outer_ || !c->newborn) continue;
    // The foreign call that could write to it unseen has ended. The new version is final.
    new_version_locked(c, &trash);
    end_newborn_locked(c);
  }
}

void ForeignScope::keep(Cell* c) {
  if (c->small || serials_.count(c->serial)) return;
  const Hold lock(graph_lock());
  if ((c->state.load() & kDead) || !c->storage._unsafe_get_target()) return;
  serials_.insert(c->serial);
  kept_.push_back(c->storage);
  stand_pinned_locked(c);
}

void ForeignScope::keep(const Frame& frame) {
  for (const Touched& t : frame.cells()) keep(t.cell);
}

void ForeignScope::keep(const c10::IValue& view) {
  c10::TensorImpl* t = view.isTensor() ? view.unsafeToTensorImpl() : nullptr;
  Cell* c = t && t->has_storage() ? cell_of(t->unsafe_storage().unsafeGetStorageImpl()) : nullptr;
  if (!c || c->small) return;
  pin(c, ticks());
  try {
    restore_cell(c);
    keep(c);
  } catch (...) {
    unpin(c);
    throw;
  }
  unpin(c);
}

ForeignCall::ForeignCall(Session& session) : frame(session) {
  finish_all_pending(session, true);
  ++tl_readers;
}

ForeignCall::~ForeignCall() { --tl_readers; }

void ForeignCall::begin() {
  frame.pin_all();
  frame.begin_writes();
}

// ---- functions of extension modules ----

namespace {

struct Guarded {
  PyObject* function;  // a weak reference: some functions are made while a program runs
  PyCFunction original;
  Session* session;
};

// By the object that pybind11 binds to each function as its self: the record of its overloads. Guarded by the GIL.
NoDestructor<std::unordered_map<PyObject*, Guarded>> guarded_functions;

THPObjectPtr alive(const Guarded& g) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* function = nullptr;
  PyWeakref_GetRef(g.function, &function);
  return THPObjectPtr(function);
#else
  PyObject* function = PyWeakref_GetObject(g.function);
  return THPObjectPtr(function == Py_None ? nullptr : Py_NewRef(function));
#endif
}

// Visits each object in these containers.
template <class Visit>
void for_each_in(PyObject* o, const Visit& visit, int depth = 0) {
  if (depth < 8 && (PyTuple_Check(o) || PyList_Check(o))) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(o); ++i)
      for_each_in(PySequence_Fast_GET_ITEM(o, i), visit, depth + 1);
  } else if (depth < 8 && PyDict_Check(o)) {
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(o, &at, &key, &value);) for_each_in(value, visit, depth + 1);
  } else {
    visit(o);
  }
}

void collect(PyObject* in, std::vector<StoragePtr>* found) {
  for_each_in(in, [&](PyObject* o) {
    if (StoragePtr s = THPVariable_Check(o) ? storage_of(o) : StoragePtr()) found->push_back(std::move(s));
  });
}

// Calls `call` with these storages in memory, pinned and counted as written.
template <class Call>
PyObject* call_with(Session& session, std::vector<StoragePtr> storages, Call&& call) {
  PyObject* pin = guarded([&] {
    finish_all_pending(session);  // the call may use tensors that are not among its arguments
    return new_pin(session, std::move(storages), PinLife::kCall, true);
  });
  if (!pin) return nullptr;
  PyObject* result;
  {
    ForeignScope scope;
    result = call();
  }
  if (result) for_each_in(result, [&](PyObject* o) { guard_function(session, o); });
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  Py_DECREF(pin);
  PyErr_Restore(type, value, trace);
  return result;
}

// `visit` collects the arguments' storages, `call` calls the original.
template <class Visit, class Call>
PyObject* call_guarded(PyObject* self, Visit&& visit, Call&& call) {
  const auto found = guarded_functions->find(self);
  if (found == guarded_functions->end()) {
    PyErr_SetString(PyExc_RuntimeError, "memmgr: a guarded function has lost its original");
    return nullptr;
  }
  void* original = reinterpret_cast<void*>(found->second.original);
  Session& session = *found->second.session;
  if (!session.open.load()) return call(original);
  std::vector<StoragePtr> storages;
  visit(&storages);
  return call_with(session, std::move(storages), [&] { return call(original); });
}

// pybind11's two conventions: before and from 3.0 on.
PyObject* call_with_tuple(PyObject* self, PyObject* args, PyObject* kwargs) {
  return call_guarded(
      self,
      [&](auto* found) {
        collect(args, found);
        if (kwargs) collect(kwargs, found);
      },
      [&](void* original) { return reinterpret_cast<PyCFunctionWithKeywords>(original)(self, args, kwargs); });
}

PyObject* call_with_array(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* names) {
  return call_guarded(
      self,
      [&](auto* found) {
        const Py_ssize_t all = n + (names ? PyTuple_GET_SIZE(names) : 0);
        for (Py_ssize_t i = 0; i < all; ++i) collect(args[i], found);
      },
      [&](void* original) {
        using Function = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);
        return reinterpret_cast<Function>(original)(self, args, n, names);
      });
}

// Drops entries of functions that have ended, so that a program that keeps making functions does not fill the memory.
void forget_ended() {
  static size_t enough = 1024;
  auto& all = *guarded_functions;
  if (all.size() < enough) return;
  for (auto it = all.begin(); it != all.end();) {
    if (alive(it->second)) {
      ++it;
    } else {
      Py_DECREF(it->second.function);
      it = all.erase(it);
    }
  }
  enough = 2 * std::max<size_t>(all.size(), 512);
}

template <class F>
PyCFunction erased(F* f) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f));
}

// Returns the function that replaces the C function of one that pybind11 has bound. Null: pybind11 has not bound it.
PyCFunction guarding(PyObject* function) {
  PyObject* self = PyCFunction_CheckExact(function) ? PyCFunction_GET_SELF(function) : nullptr;
  // The definition of a function of a module is not read: it may lie anywhere.
  if (!self || PyModule_CheckExact(self)) return nullptr;
  // Each function of pybind11 has a self of its own, the record of its overloads.
  if (!PyCapsule_CheckExact(self) && !std::strstr(Py_TYPE(self)->tp_name, "function_record")) return nullptr;
  const int flags = reinterpret_cast<PyCFunctionObject*>(function)->m_ml->ml_flags;
  const bool array = flags == (METH_FASTCALL | METH_KEYWORDS);
  if (!array && flags != (METH_VARARGS | METH_KEYWORDS)) return nullptr;
  return array ? erased(&call_with_array) : erased(&call_with_tuple);
}

}  // namespace

Libraries::Libraries(PyObject* paths) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(paths); ++i) {
    const THPObjectPtr path(PyUnicode_EncodeFSDefault(PyList_GET_ITEM(paths, i)));
    if (!path) throw python_error();
    paths_.insert(PyBytes_AS_STRING(path.get()));
  }
}

bool Libraries::hold(const void* code) {
  const auto [found, is_new] = known_.emplace(code, false);
  Dl_info where;
  if (is_new) found->second = dladdr(code, &where) && paths_.count(where.dli_fname);
  return found->second;
}

bool Libraries::have_bound(PyObject* function) {
  return guarding(function) &&
         hold(reinterpret_cast<const void*>(reinterpret_cast<PyCFunctionObject*>(function)->m_ml->ml_meth));
}

bool guard_function(Session& session, PyObject* function, Libraries* libraries) {
  const PyCFunction guarded = guarding(function);
  if (!guarded) return false;
  PyMethodDef* def = reinterpret_cast<PyCFunctionObject*>(function)->m_ml;
  if (def->ml_meth == guarded) return false;
  // Each library has pybind11's function of its own, through which all of its functions are called.
  if (libraries && !libraries->hold(reinterpret_cast<const void*>(def->ml_meth))) return false;
  PyObject* weak = PyWeakref_NewRef(function, nullptr);
  if (!weak) {
    PyErr_Clear();
    return false;
  }
  Guarded& g = (*guarded_functions)[PyCFunction_GET_SELF(function)];
  Py_XDECREF(g.function);  // of a function that has ended and had the same self
  g = {weak, def->ml_meth, &session};
  def->ml_meth = guarded;
  forget_ended();
  return true;
}

PyObject* call_foreign(Session& session, PyObject* function, PyObject* args, PyObject* kwargs) {
  std::vector<StoragePtr> storages;
  if (session.open.load()) {
    collect(args, &storages);
    collect(kwargs, &storages);
  }
  return call_with(session, std::move(storages), [&] { return PyObject_Call(function, args, kwargs); });
}

void unguard_functions() {
  std::unordered_map<PyObject*, Guarded> all;
  all.swap(*guarded_functions);
  for (auto& [self, g] : all) {
    if (THPObjectPtr function = alive(g))
      reinterpret_cast<PyCFunctionObject*>(function.get())->m_ml->ml_meth = g.original;
    Py_DECREF(g.function);
  }
}

// ---- calls above the kernel ----

MEMMGR_PRIVATE_MEMBER(SavedOfContext, torch::autograd::AutogradContext, saved_variables_)
MEMMGR_PRIVATE_MEMBER(DataOfSaved, torch::autograd::SavedVariable, data_)

namespace {

// The beginning of every CppNode<T>.
struct CustomNode : torch::autograd::Node {
  torch::autograd::AutogradContext context;
};

NoDestructor<std::unordered_set<c10::OperatorName>> shown_ops;

// Torch's callbacks have no argument of their own. Set before the first is registered, and read by threads that still
// run one after it was removed.
std::atomic<Session*> session_of_calls{nullptr};

std::unique_ptr<at::ObserverContext> foreign_call_begins(const at::RecordFunction& fn) {
  Session& session = *session_of_calls.load(std::memory_order_relaxed);
  if (!session.open.load() || tl_running_recipes > 0 || !thread_is_seen()) return nullptr;
  std::vector<torch::autograd::SavedVariable>* saved = nullptr;
  if (fn.scope() == at::RecordScope::BACKWARD_FUNCTION) {
    const auto node = torch::autograd::get_current_node();
    if (!node || std::strncmp(fn.name(), "torch::autograd::CppNode<", 25) != 0) return nullptr;
    saved = &(static_cast<CustomNode*>(node.get())->context.*private_member(SavedOfContext()));
  } else {
    const auto name = fn.operator_name();
    if (!name || !shown_ops->count(*name)) return nullptr;
  }
  auto call = std::make_unique<ForeignCall>(session);
  for (const c10::IValue& v : fn.inputs()) call->frame.value(v, true);
  if (saved)
    for (auto& v : *saved) {
      const at::Tensor& t = v.*private_member(DataOfSaved());
      if (t.defined()) call->frame.tensor(t.unsafeGetTensorImpl(), true);
    }
  call->begin();
  return call;
}

at::CallbackHandle ops_watch = at::INVALID_CALLBACK_HANDLE, nodes_watch = at::INVALID_CALLBACK_HANDLE;

at::CallbackHandle watch(at::RecordScope scope) {
  return at::addGlobalCallback(at::RecordFunctionCallback(&foreign_call_begins).needsInputs(true).scopes({scope}));
}

}  // namespace

void watch_foreign_calls(Session& session) {
  session_of_calls = &session;
  // Filled before the callback that reads it is registered. An op that is registered later needs a new callback.
  std::unordered_set<c10::OperatorName> found;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (op && runs_above_the_kernel(*op)) found.insert(name);
  }
  listen(kForeignCalls, true);
  if (nodes_watch == at::INVALID_CALLBACK_HANDLE) nodes_watch = watch(at::RecordScope::BACKWARD_FUNCTION);
  if (found.size() == shown_ops->size()) return;
  if (ops_watch != at::INVALID_CALLBACK_HANDLE) at::removeCallback(ops_watch);
  *shown_ops = std::move(found);
  ops_watch = watch(at::RecordScope::FUNCTION);
}

void forget_foreign_calls() {
  for (at::CallbackHandle* h : {&ops_watch, &nodes_watch}) {
    if (*h != at::INVALID_CALLBACK_HANDLE) at::removeCallback(*h);
    *h = at::INVALID_CALLBACK_HANDLE;
  }
  shown_ops->clear();
  listen(kForeignCalls, false);
}

// ---- libraries that link libtorch ----

namespace {

// The libraries that were found when the loader had added and removed so many. Guarded by the GIL.
struct KnownLibraries {
  unsigned long long adds = 0, subs = 0;
  std::vector<std::string> paths;
};

NoDestructor<KnownLibraries> known_libraries;

}  // namespace

const std::vector<std::string>& libraries_that_use_torch() {
  // Each budget's opening calls it. It searches again if the loader has added or removed a library since.
  bool first = true;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* first) {
        if (std::exchange(*static_cast<bool*>(first), false)) {
          KnownLibraries& known = *known_libraries;
          if (info->dlpi_adds == known.adds && info->dlpi_subs == known.subs) return 1;
          known = {info->dlpi_adds, info->dlpi_subs, {}};
        }
        const char* names = nullptr;
        size_t length = 0;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          if (info->dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
          const auto* d = reinterpret_cast<const ElfW(Dyn)*>(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
          for (; d->d_tag != DT_NULL; ++d) {
            if (d->d_tag == DT_STRTAB) names = reinterpret_cast<const char*>(d->d_un.d_ptr);
            if (d->d_tag == DT_STRSZ) length = d->d_un.d_val;
          }
        }
        // glibc has relocated the address; where it has not (vdso), it is an offset.
        if (names && reinterpret_cast<uintptr_t>(names) > info->dlpi_addr && info->dlpi_name[0] &&
            memmem(names, length, "3c10", 4))
          known_libraries->paths.push_back(info->dlpi_name);
        return 0;
      },
      &first);
  return known_libraries->paths;
}

}  // namespace memmgr::pager
