// Launches of a compiled graph's kernels: each is an op (rules 3 to 5). Its tensors are touched and pinned, the
// written ones get a new version, it runs, and between two launches all of them may be evicted.
#pragma once

#include <Python.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/FunctionRef.h>

#include <string>

#include "dispatch/launch_recording.h"

namespace memmgr::pager {

// Calls the kernel, and returns its result, or null after an error of Python's. The frame has the launch's pins; it is
// null where the launch is not paged.
using LaunchBody = c10::function_ref<PyObject*(const Frame*)>;
// Launches a kernel as an op. The GIL is held.
PyObject* launch(const LaunchedKernel& kernel, Positional args, LaunchBody run);

// Makes the launches of a compiled graph's kernel ops from now on. `args`: a letter for each argument, ARGUMENT_... in
// base/constants.def. `repeats`: with the same bytes in its arguments the kernel writes the same bytes again, and its
// numbers are integers. False: the function is not from Inductor's binding.
bool page_kernel(PyObject* function, const std::string& key, const std::string& name, const std::string& args,
                 bool repeats);
// Returns a function for Python that launches a Triton kernel by `run`, each launch as an op. A tensor whose letter is
// missing is written. `repeats`: as above; no two kernels of a budget have the same key then. The GIL is held.
PyObject* paged_run(PyObject* run, const std::string& key, const std::string& name, const std::string& args,
                    bool repeats);
// Returns true if a Triton kernel is being launched in this thread, or runs again. The storage then stays where it is
// until the launch ends. The GIL is held.
bool in_launch(c10::StorageImpl* s);
// Makes all kernels run as they did before.
void unpage_kernels();

}  // namespace memmgr::pager
