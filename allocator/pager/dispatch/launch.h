// Launches of a compiled graph's kernels: each is an op (rules 3 to 5). Its tensors are touched and pinned, the
// written ones get a new version, it runs, and between two launches all of them may be evicted.
#pragma once

#include <Python.h>
#include <c10/core/StorageImpl.h>

#include <string>

namespace memmgr::pager {

// Makes the launches of a compiled graph's kernel ops from now on. `args`: a letter for each argument, ARGUMENT_... in
// base/constants.def. `repeats`: with the same bytes in its arguments the kernel writes the same bytes again, and its
// numbers are integers. False: the function is not from Inductor's binding.
bool page_kernel(PyObject* function, const std::string& key, const std::string& name, const std::string& args,
                 bool repeats);
// Returns a function for Python that launches a Triton kernel by `run`, each launch as an op. A tensor whose letter is
// missing is written. `repeats`: as above; no two kernels of a budget have the same key then. The GIL is held.
PyObject* paged_run(PyObject* run, const std::string& key, const std::string& name, const std::string& args,
                    bool repeats);
// Makes the buffers that compiled graphs allocate by this function cells from their beginning. False: it is no function
// of C with positional arguments.
bool page_buffers(PyObject* function);
// The function that copies inputs whose address is not aligned reads no address of an absent tensor from now on. False:
// it is no function of C with one argument.
bool page_alignment_check(PyObject* function);
// Returns true if a Triton kernel is being launched in this thread, or runs again. The storage then stays where it is
// until the launch ends. The GIL is held.
bool in_launch(c10::StorageImpl* s);
// Makes all kernels and functions run as they did before.
void unpage_kernels();
// Calls a compiled graph. `forward`: it is that of a training, whose ops and launches have recipes, although it runs
// without gradient mode. The GIL is held.
PyObject* call_graph(PyObject* function, PyObject* args, PyObject* kwargs, bool forward);

}  // namespace memmgr::pager
