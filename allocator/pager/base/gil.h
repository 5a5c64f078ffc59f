// The GIL: released while a thread waits, and Python code that runs in the middle of an op.
#pragma once

#include <Python.h>

namespace memmgr::pager {

// Releases the GIL if this thread has it, so that its wait does not block other threads.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil() noexcept(false);  // a thread that asks for the GIL of an interpreter that ends is unwound from there
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* saved_ = nullptr;
};

// Disables collections: a collection runs finalizers, which may let other threads run.
struct NoCollection {
  const int collects = PyGC_Disable();
  NoCollection() = default;
  NoCollection(const NoCollection&) = delete;
  NoCollection& operator=(const NoCollection&) = delete;
  ~NoCollection() {
    if (collects) PyGC_Enable();
  }
};

// Python code that is called in the middle of an op is not compiled while it lives. In a thread in which Dynamo
// compiles frames it would be. With the GIL.
class NotCompiled {
 public:
  NotCompiled();
  ~NotCompiled();
  NotCompiled(const NotCompiled&) = delete;
  NotCompiled& operator=(const NotCompiled&) = delete;

 private:
  PyObject* before_;
};

}  // namespace memmgr::pager
