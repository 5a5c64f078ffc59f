// The search for living objects of Python's: tensors, models, optimizers.
#pragma once

#include <Python.h>

namespace memmgr::pager {

extern PyMethodDef object_methods[];

}  // namespace memmgr::pager
