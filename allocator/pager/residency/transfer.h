// Copies between cells and the tier that the tier's workers make while the program runs.
#pragma once

#include "base/lock.h"
#include "base/session.h"
#include "cells/types.h"

namespace memmgr::pager {

// Begins to write a resident cell without pins, ahead of need. The cell is clean once the write has ended. A write to
// the cell, or its end, cancels it. True: the caller calls last_user_is_gone() once the lock is free.
bool begin_write_locked(Cell* c) REQUIRES(graph_lock());
// Waits until a write that was begun has ended. The cell is then clean if the write succeeded. The caller has the cell
// busy and holds `lock`, which is released during the wait.
void await_write(Cell* c) REQUIRES(graph_lock());

// Begins to read an offloaded cell if there is room without an eviction. True: the read has begun, or there is nothing
// to read. False: there is no room, or prefetches are off. No lock is held.
bool begin_read(Cell* c);
// Waits for a read of this cell that was begun, and ends it. False: there is none. No lock is held.
bool finish_read(Cell* c);

// Ends the copies that are done: written cells become clean, read cells resident.
void poll_transfers(const Session& session);
// Waits for one read that was begun, and ends it. False: there is none.
bool finish_any_read();
// Frees the copies in the tier of resident cells, written or being written. True: there were some.
bool drop_clean_copies();
// Waits for all copies.
void finish_transfers(const Session& session);
bool transfers_under_way();
}  // namespace memmgr::pager
