// The net for ops of threads that are not seen (rule 12).
#pragma once

#include <Python.h>

#include <atomic>

namespace memmgr::pager {

// Registers the net, or removes it. A budget registers it when it opens.
void catch_unseen_threads(bool on);

}  // namespace memmgr::pager
