// Launches of a compiled graph's kernels: each is an op (rules 3 and 4). Its tensors are touched and pinned, the
// written ones get a new version, it runs, and between two launches all of them may be evicted.
#pragma once

#include <Python.h>

#include <string>

namespace memmgr::pager {

// Makes the launches of a compiled graph's kernel ops from now on. `args`: a letter for each argument, ARGUMENT_... in
// base/constants.def. False: the function is not from Inductor's binding.
bool page_kernel(PyObject* function, const std::string& key, const std::string& name, const std::string& args);
// Makes all kernels run as they did before.
void unpage_kernels();

}  // namespace memmgr::pager
