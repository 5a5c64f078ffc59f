// The search for living Python objects: tensors, models, optimizers.
#pragma once

#include <Python.h>

namespace memmgr::pager {

extern PyMethodDef object_methods[];

}  // namespace memmgr::pager
