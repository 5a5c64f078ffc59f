// The GIL: giving it away while a thread waits, and Python that runs in the middle of an op.
#pragma once

#include <Python.h>

namespace memmgr::pager {

// Releases the GIL if this thread has it: a thread that waits does not block the others.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* saved_ = nullptr;
};

// A collection runs what objects have to say at their end, and lets other threads go on.
struct NoCollection {
  const int collects = PyGC_Disable();
  NoCollection() = default;
  NoCollection(const NoCollection&) = delete;
  NoCollection& operator=(const NoCollection&) = delete;
  ~NoCollection() {
    if (collects) PyGC_Enable();
  }
};

// Python that is called in the middle of an op runs as it is: in a thread in which Dynamo compiles frames, it would
// compile these. With the GIL.
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
