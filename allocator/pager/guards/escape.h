// Addresses that were handed out for good (rule 9).
#pragma once

#include "cells/types.h"

namespace memmgr::pager {

// Brings the cell back, pins it for as long as its storage lives, and makes it nobody's recipe's input again: whoever
// has the address may write there at any time. The caller holds its storage.
void escape(Cell* c, Escape why);
// A write that no op announces.
void foreign_write(c10::StorageImpl* s);

}  // namespace memmgr::pager
