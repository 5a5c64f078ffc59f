// Functions for Python's readers of raw bytes.
#pragma once

#include <Python.h>

namespace memmgr::pager {

bool add_reader_functions(PyObject* module);

}  // namespace memmgr::pager
