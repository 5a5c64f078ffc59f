// Room for memory that is not the pool's: storages that become cells, and memory of other libraries.
#pragma once

#include <c10/util/FunctionRef.h>

#include "base/session.h"
#include "cells/types.h"

namespace memmgr::pager {

// Makes a cell of a storage. Memory of torch's default allocator counts from then on: victims are evicted for it first.
// may_wait: the calling thread is in no admitted op, so it may wait for other ops to end.
Cell* adopt_in_budget(Session& session, c10::StorageImpl* s, bool may_wait);
// Does the same, but a mapped storage that finds no room stays as it is: null.
Cell* adopt_if_room(Session& session, c10::StorageImpl* s, bool may_wait);
// Calls `take` once there is room for so many bytes that are not the pool's.
void with_room(Session& session, uint64_t nbytes, bool may_wait, c10::function_ref<void()> take);

// Counts a storage that cannot be evicted (fixed_memory.h), once there is room for it. Throws if there is none.
void count_fixed_in_budget(Session& session, c10::StorageImpl* s, bool may_wait);

}  // namespace memmgr::pager
