// A pool without cells, for tests of devices.
#pragma once

#include <Python.h>

namespace memmgr::pager {

extern PyMethodDef pool_methods[];

}  // namespace memmgr::pager
