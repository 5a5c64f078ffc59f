// Pins of Python's: they keep the bytes of tensors where they are while a call that reads them runs (rule 9: scoped).
#pragma once

#include <Python.h>

#include <vector>

#include "base/tensors.h"

namespace memmgr::pager {

// A pin of these. region: this thread's ops are not paged meanwhile, since whoever called reads what they make without
// an op. reader: it lives as long as a call of this thread, which has said whether it writes. hardly: it reads one
// element, so that a mapped storage for which there is no room stays where it is.
// Null with Python's error set.
PyObject* new_pin(std::vector<StoragePtr> storages, bool written, bool region, bool reader, bool hardly = false);
bool prepare_pins();  // once

}  // namespace memmgr::pager
