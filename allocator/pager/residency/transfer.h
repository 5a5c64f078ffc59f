// Copies between cells and the tier that run in the tier's own workers, beside the program.
#pragma once

#include "cells/types.h"

namespace memmgr::pager {

// Begins to write a resident cell that nobody has pinned, ahead of need: once that is done it is clean. A write to the
// cell, or its end, cancels it. True: the caller calls last_user_is_gone() once the lock is free.
bool begin_write_locked(Cell* c);
// Waits until a write that was begun has ended; afterwards the cell is clean if it went well. The caller has the cell
// busy and holds `lock`, which is released meanwhile.
void await_write(Cell* c, std::unique_lock<std::mutex>* lock);

// Begins to read an offloaded cell back, where there is room without anybody's leaving. False: not now. No lock is
// held.
bool begin_read(Cell* c);
// Ends a read of this cell that was begun, waiting for its bytes. False: there is none. No lock is held.
bool finish_read(Cell* c);

// Looks at what is under way: what has been written is clean, what has been read is there.
void poll_transfers();
// Ends one read that is under way, waiting for it. False: there is none.
bool finish_any_read();
// Copies below of what is in memory, written or being written, give their room back. True: there were some.
bool drop_clean_copies();
// Waits for all of it.
void finish_transfers();
bool transfers_under_way();
}  // namespace memmgr::pager
