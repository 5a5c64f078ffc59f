// Pins that Python holds: they keep the bytes of tensors in place while a call reads them (rule 9: scoped), or for as
// long as `memmgr.pin` or a collective keeps them.
#pragma once

#include <Python.h>

#include <cstdint>
#include <vector>

#include "base/session.h"
#include "base/tensors.h"

namespace memmgr::pager {

enum class PinLife : uint8_t {
  kCall,    // a call of this thread that has declared its writes
  kRegion,  // such a call, and its thread's ops are not paged, since the caller reads their outputs without an op
  kHeld,    // until it is released: a long pin
};

// Returns an object that pins these storages while it lives; null with Python's error set. one_element: the call reads
// one element, so a mapped storage that finds no room stays in its mapping.
PyObject* new_pin(Session& session, std::vector<StoragePtr> storages, PinLife life, bool written,
                  bool one_element = false);
PyTypeObject* pin_class();  // null: Python's error is set

}  // namespace memmgr::pager
