// What the files of the Python module share.
#pragma once

#include <Python.h>

#include "cells/cell.h"

namespace memmgr::pager {

// In a catch block: what was thrown becomes Python's error of the same meaning.
void set_python_error();
template <class F>
PyObject* guarded(F&& body) {
  try {
    return body();
  } catch (const std::exception&) {
    set_python_error();
  }
  return nullptr;
}

bool add_reader_functions(PyObject* module);  // bind_readers.cpp
extern PyMethodDef figure_methods[];          // bind_figures.cpp
extern PyMethodDef pool_methods[];            // bind_pool.cpp

}  // namespace memmgr::pager
