// Pins that Python holds: they keep the bytes of tensors in place while a call reads them (rule 9: scoped).
#pragma once

#include <Python.h>

#include <vector>

#include "base/session.h"
#include "base/tensors.h"

namespace memmgr::pager {

// Returns an object that pins these storages; null with Python's error set. region: this thread's ops are not paged
// while it lives, since the caller reads their outputs without an op. reader: it lives as long as a call of this thread
// that has declared its writes. hardly: the call reads one element, so a mapped storage that finds no room stays in its
// mapping.
PyObject* new_pin(Session& session, std::vector<StoragePtr> storages, bool written, bool region, bool reader,
                  bool hardly = false);
PyTypeObject* pin_class();  // null: Python's error is set

}  // namespace memmgr::pager
