#pragma once

#include <Python.h>

namespace memmgr::pager {

bool add_plan_functions(PyObject* module);
// Called when a budget ends.
void forget_periods();

}  // namespace memmgr::pager
