#include "cells/file_range.h"

#include <Python.h>
#include <sys/mman.h>

#include "base/deferred_drop.h"
#include "base/mapped_areas.h"
#include "base/tensors.h"

namespace memmgr::pager {

c10::DeleterFnPtr end_of_slice = nullptr;

MappedRange::~MappedRange() {
  if (clean) drop_pages(*this);
  if (!home.get() || home.get_deleter() != end_of_slice) return;
  // Python may hold the whole storage, too. The deferred-drop thread drops the reference, without a lock.
  drop_later(StoragePtr::reclaim(static_cast<c10::StorageImpl*>(home.release_context())));
}

void drop_pages(const MappedRange& range) {
  const auto begin = reinterpret_cast<uintptr_t>(range.begin);
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage, last = (begin + range.nbytes) / kPage * kPage;
  // Pages that the range shares with its neighbours are kept.
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

void learn_mapped() {
  if (end_of_slice) return;
  PyObject* torch = PyImport_ImportModule("torch");
  PyObject* whole = torch ? PyObject_CallMethod(torch, "UntypedStorage", "i", 2) : nullptr;
  PyObject* part = whole ? PySequence_GetSlice(whole, 0, 1) : nullptr;
  PyObject* address = part ? PyObject_GetAttrString(part, "_cdata") : nullptr;
  if (address) end_of_slice = pointer_of(static_cast<c10::StorageImpl*>(PyLong_AsVoidPtr(address))).get_deleter();
  for (PyObject* o : {address, part, whole, torch}) Py_XDECREF(o);
  PyErr_Clear();
}

}  // namespace memmgr::pager
