// References to storages that a thread may take and give back without the GIL.
#pragma once

#include "base/tensors.h"

namespace memmgr::pager {

// A strong reference that never takes the GIL (rule 11); null where that cannot be had.
StoragePtr hold_storage(const WeakStorage& weak);
// True if that is null for now, because a Python object is all that has the storage.
bool only_python_has(const WeakStorage& weak);
// Gives such a reference back. Where that may take the GIL a thread of ours does it, which may be late: until then the
// bytes stay.
void drop(StoragePtr storage);          // no lock is held, and this is not malloc
void drop_later(StoragePtr storage);    // from wherever
bool wait_for_dropper(double seconds);  // false: nothing waited to be dropped
void drop_what_waits();                 // for tests, and at the end of a budget
void stop_dropper();
void forget_dropper_in_child();

}  // namespace memmgr::pager
