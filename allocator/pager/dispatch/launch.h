// Launches of a compiled graph's kernels: each is an op (rules 3 to 5). Its tensors are touched and pinned, the
// written ones get a new version, it runs, and between two launches all of them may be evicted.
#pragma once

#include <Python.h>

#include <string>

namespace memmgr::pager {

// Makes the launches of a compiled graph's kernel ops from now on. `args`: a letter for each argument, ARGUMENT_... in
// base/constants.def. `repeats`: with the same bytes in its arguments the kernel writes the same bytes again, and its
// numbers are integers. False: the function is not from Inductor's binding.
bool page_kernel(PyObject* function, const std::string& key, const std::string& name, const std::string& args,
                 bool repeats);
// Makes the buffers that compiled graphs allocate by this function cells from their beginning. False: it is no function
// of C with positional arguments.
bool page_buffers(PyObject* function);
// Makes all kernels, and the allocation of buffers, run as they did before.
void unpage_kernels();
// Calls a compiled graph. `forward`: it is that of a training, whose ops and launches have recipes, although it runs
// without gradient mode. The GIL is held.
PyObject* call_graph(PyObject* function, PyObject* args, PyObject* kwargs, bool forward);

}  // namespace memmgr::pager
