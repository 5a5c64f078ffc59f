// Reports to observers: events by op and module, the cells, their holders, the address space. Nothing here changes a
// decision or keeps bytes alive: cells are described under the graph's lock, and no reference to a storage is taken.
#pragma once

#include <ATen/core/Tensor.h>
#include <Python.h>

#include <atomic>
#include <cstdint>

namespace memmgr::pager {

// Returns (its storage's address, bytes in memory, bytes, counted by the budget already); None: no storage on the
// device.
PyObject* info_of_storage(const at::Tensor& t);

extern PyMethodDef observe_methods[];

}  // namespace memmgr::pager
