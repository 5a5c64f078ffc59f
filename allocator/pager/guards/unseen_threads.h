// Whose ops are seen (rule 12), and where in an op a thread is.
#pragma once

#include <Python.h>

#include <atomic>

namespace memmgr::pager {

// The net for threads that are not seen: registered with a budget.
void catch_unseen_threads(bool on);

}  // namespace memmgr::pager
