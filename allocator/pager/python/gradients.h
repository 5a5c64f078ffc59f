// Gradients that another thread may be putting in place. A parameter's .grad is replaced by backward without the GIL,
// and by `p.grad = None` in two halves with the GIL free between them, so that at some moments it names a tensor that
// has died.
#pragma once

#include <Python.h>

namespace memmgr::pager {

extern PyMethodDef gradient_methods[];

}  // namespace memmgr::pager
