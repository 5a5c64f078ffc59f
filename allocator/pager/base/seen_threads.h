// Threads whose ops are seen (rule 12): the dispatch key that they include, and torch's callbacks.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/constants.h"

namespace memmgr::pager {

// Makes the ops of this thread seen, and those of threads that get torch's thread state from it.
void see_this_thread(bool on);
bool thread_is_seen();

// Listeners to the ops of this process by torch's callbacks (at::RecordFunction), other than the net for unseen
// threads.
enum Listener : uint32_t { kOthers = 1, kForeignCalls = 2, kProfiler = 4 };
extern std::atomic<uint32_t> listeners;
// Without listeners the callbacks of the thread that opened the budget are off: each costs every call of the dispatcher
// 0.1 us, `mm` makes several calls, and the net has nothing to find in a thread that is seen.
void listen(Listener who, bool on);
void let_callbacks_rest(bool on);
void follow_listeners();

}  // namespace memmgr::pager
