// The net for ops of threads that are not seen (rule 12).
#pragma once

#include <Python.h>

#include <atomic>

namespace memmgr::pager {

struct Session;

// Registers the net, or removes it. A budget registers it when it opens.
void catch_unseen_threads(Session& session, bool on);

}  // namespace memmgr::pager
