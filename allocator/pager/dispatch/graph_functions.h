// The functions in C that a compiled graph calls between its launches, and the call of the graph itself.
#pragma once

#include <Python.h>

namespace memmgr::pager {

// Makes the buffers that compiled graphs allocate by this function cells from their beginning. Returns false if the
// function is not one of C with positional arguments.
bool page_buffers(PyObject* function);
// The function that copies inputs whose address is not aligned reads no address of an absent tensor from now on.
// Returns false if it is not one of C with one argument.
bool page_alignment_check(PyObject* function);
// Makes these functions run as they did before.
void unpage_graph_functions();
// Calls a compiled graph. `forward`: it is that of a training, whose ops and launches have recipes, although it runs
// without gradient mode. The GIL is held.
PyObject* call_graph(PyObject* function, PyObject* args, PyObject* kwargs, bool forward);

}  // namespace memmgr::pager
