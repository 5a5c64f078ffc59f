// C++ that is not torch's. It takes addresses and then allocates, or writes without an op (rules 3, 4 and 9).
#pragma once

#include <ATen/record_function.h>
#include <Python.h>

#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/session.h"
#include "base/tensors.h"
#include "cells/cell.h"
#include "cells/types.h"
#include "guards/touched_cells.h"

namespace memmgr::pager {

// While a scope lives, each cell that this thread's ops touch or make stays where it is as long as its storage lives,
// and no recipe is recorded. The foreign code may have the address, and change the bytes between two ops.
class ForeignScope {
 public:
  ForeignScope();
  ~ForeignScope();
  ForeignScope(const ForeignScope&) = delete;
  ForeignScope& operator=(const ForeignScope&) = delete;

  void keep(Cell* c);  // the caller has a pin
  void keep(const Frame& frame);
  void keep(const c10::IValue& view);

 private:
  ForeignScope* outer_;
  std::vector<WeakStorage> kept_;
  std::unordered_set<uint64_t> serials_;
};

// Foreign code runs while a call lives. Cells that are put into its frame before `begin` are resident and pinned, and
// count as written.
struct ForeignCall final : at::ObserverContext {
  explicit ForeignCall(Session& session);
  ~ForeignCall() override;
  void begin();

  Frame frame;
  ForeignScope scope;
};

// Libraries, given by their paths. Checks if code lies in one of them.
class Libraries {
 public:
  explicit Libraries(PyObject* paths);  // a list
  bool hold(const void* code);
  bool have_bound(PyObject* function);  // by pybind11

 private:
  std::unordered_set<std::string> paths_;
  std::unordered_map<const void*, bool> known_;
};

// Guards a function that pybind11 has bound, in one of these libraries if any are named. Its tensors are then resident
// and pinned while it runs, and count as written. Functions that it returns are guarded, too. True: the function is
// guarded now and was not before. The GIL is held.
bool guard_function(Session& session, PyObject* function, Libraries* libraries = nullptr);
void unguard_functions();
// Calls the function with the same care. The GIL is held.
PyObject* call_foreign(Session& session, PyObject* function, PyObject* args, PyObject* kwargs);

// Returns the loaded libraries that name symbols of c10. Other libraries have no access to a tensor's bytes.
const std::vector<std::string>& libraries_that_use_torch();

// Registers observers for calls above the kernel: ops of foreign namespaces whose C++ kernels are composite or
// autograd's own, and the backwards of autograd functions that are written in C++.
void watch_foreign_calls(Session& session);
void forget_foreign_calls();

}  // namespace memmgr::pager
