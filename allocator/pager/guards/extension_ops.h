// C++ that is not torch's: it takes addresses and then allocates, or writes, without an op (rules 3, 4 and 9).
#pragma once

#include <ATen/record_function.h>
#include <Python.h>

#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/tensors.h"
#include "cells/cell.h"
#include "cells/types.h"
#include "guards/touched_cells.h"

namespace memmgr::pager {

// While one lives, whatever this thread's ops touch or make stays where it is as long as its storage lives, and no
// recipe is noted: the foreign code may have its address, and change its bytes between two ops.
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

// Foreign code runs while one lives. What is put into its frame before it begins is in memory, pinned, and counts as
// written.
struct ForeignCall final : at::ObserverContext {
  ForeignCall();
  ~ForeignCall() override;
  void begin();

  Frame frame;
  ForeignScope scope;
};

// Libraries by their paths, and what lies in them.
class Libraries {
 public:
  explicit Libraries(PyObject* paths);  // a list
  bool hold(const void* code);
  bool have_bound(PyObject* function);  // by pybind11

 private:
  std::unordered_set<std::string> paths_;
  std::unordered_map<const void*, bool> known_;
};

// A function that was bound by pybind11, in one of these libraries if any are named: from here on its tensors are
// resident and pinned while it runs, and count as written; what functions it returns are guarded, too. True: it is one,
// and was not guarded yet. The GIL is held.
bool guard_function(PyObject* function, Libraries* libraries = nullptr);
void unguard_functions();
// Calls it with the same care; the GIL is held.
PyObject* call_foreign(PyObject* function, PyObject* args, PyObject* kwargs);

// The loaded libraries that name symbols of c10: who does not has no way to a tensor's bytes.
const std::vector<std::string>& libraries_that_use_torch();

// What runs above the kernel is caught by observers, from here on: ops of foreign namespaces whose C++ kernels are
// composite or autograd's own, and the backwards of autograd functions that are written in C++.
void watch_foreign_calls();
void forget_foreign_calls();

}  // namespace memmgr::pager
