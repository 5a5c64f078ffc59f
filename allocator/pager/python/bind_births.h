// Functions of the Python module for reports on the holders of memory: living cells, those of the peak, source lines.
#pragma once

#include <Python.h>

namespace memmgr::pager {

extern PyMethodDef birth_methods[];

}  // namespace memmgr::pager
