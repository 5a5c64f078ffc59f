// Launches of a compiled graph's kernels: each is an op (rules 3 and 4). Its tensors are touched and pinned, the
// written ones get a new version, it runs, and between two launches all of them may be evicted.
#pragma once

#include <Python.h>

namespace memmgr::pager {

extern PyMethodDef launch_methods[];

}  // namespace memmgr::pager
