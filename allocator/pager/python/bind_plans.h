#pragma once

#include <Python.h>

namespace memmgr::pager {

bool add_plan_functions(PyObject* module);
// At a budget's end.
void forget_periods();

}  // namespace memmgr::pager
