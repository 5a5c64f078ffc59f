// References to storages that a thread may take and drop without the GIL.
#pragma once

#include "base/tensors.h"

namespace memmgr::pager {

// Returns a strong reference without the GIL (rule 11); null: it cannot be had.
StoragePtr hold_storage(const WeakStorage& weak);
// True if it cannot be had for now, because only a Python object has the storage.
bool only_python_has(const WeakStorage& weak);
// Drops such a reference. Where that may take the GIL, a thread of the pager's drops it later, and keeps the bytes
// until then.
void drop(StoragePtr storage);          // no lock is held, and this is not malloc
void drop_later(StoragePtr storage);    // from anywhere
bool wait_for_dropper(double seconds);  // false: nothing waited to be dropped
void drop_what_waits();                 // for tests, and at the end of a budget
void stop_dropper();

}  // namespace memmgr::pager
