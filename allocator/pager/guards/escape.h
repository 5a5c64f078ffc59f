// Addresses that were handed out for good (rule 9).
#pragma once

#include "cells/types.h"

namespace memmgr::pager {

// Restores the cell, pins it for as long as its storage lives, and ends its use as an input of recipes: a holder of the
// address may write there at any time. The caller holds the storage.
void escape(Cell* c, Escape why);
// Handles a write that no op declares.
void foreign_write(c10::StorageImpl* s);

}  // namespace memmgr::pager
