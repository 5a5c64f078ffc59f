// Figures, and functions for tests.
#pragma once

#include <Python.h>

namespace memmgr::pager {

extern PyMethodDef figure_methods[];

}  // namespace memmgr::pager
