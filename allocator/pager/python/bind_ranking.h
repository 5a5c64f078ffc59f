#pragma once

#include <Python.h>

namespace memmgr::pager {

bool add_ranking_functions(PyObject* module);

}  // namespace memmgr::pager
