// Other threads' gradients. A parameter's .grad is replaced by backward without the GIL, and by `p.grad = None` in two
// halves with the GIL free between them, so that at some moments it names a tensor that has died.
#pragma once

#include <Python.h>

namespace memmgr::pager {

enum class Elsewhere {
  kWaits,      // every other thread waits for somebody
  kRuns,       // one runs, and none puts gradients in place
  kGradients,  // one does, or may: nobody else reads any
};

// What the threads besides this one do. With the GIL, which is not let go of: the answer holds until the caller lets
// go.
Elsewhere elsewhere();

extern PyMethodDef gradient_methods[];

}  // namespace memmgr::pager
