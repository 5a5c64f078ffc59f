// Threads whose ops are seen (rule 12): the dispatch key that they include, and torch's callbacks beside it.
#pragma once

#include <c10/core/DispatchKey.h>

#include <atomic>
#include <cstdint>

namespace memmgr::pager {

// The dispatch key that the fallback is registered on. It has to be below autograd and autocast, above every backend,
// in no alias set, and nobody else's.
constexpr c10::DispatchKey kKey = c10::DispatchKey::Fake;

// The ops of this thread are seen from here on, and of threads that get torch's thread state from it.
void see_this_thread(bool on);
bool thread_is_seen();

// Who hears of this process's ops by torch's callbacks (at::RecordFunction) beside the net below.
enum Listener : uint32_t { kOthers = 1, kForeignCalls = 2, kProfiler = 4 };
extern std::atomic<uint32_t> listeners;
// While nobody listens, the callbacks of the thread that has opened the budget rest: each costs every call of the
// dispatcher 0.1 us, `mm` makes several, and the net has nothing to find in a thread that is seen.
void listen(Listener who, bool on);
void let_callbacks_rest(bool on);
void follow_listeners();

}  // namespace memmgr::pager
