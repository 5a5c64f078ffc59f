// The search for living Python objects: tensors, models, optimizers.
#pragma once

#include <Python.h>

namespace memmgr::pager {

// Returns a list of the tracked objects of these types or of subtypes, and the functions that pybind11 has bound in
// these libraries (null: none). References are taken and dropped without a bytecode in between: otherwise another
// thread would find references that are not its own.
PyObject* objects_of(PyObject* types, PyObject* libraries);

}  // namespace memmgr::pager
