// Threads that ask for addresses outside of ops: on a second stream, and profilers (rule 9).
#pragma once

namespace memmgr::pager {

void note_stream();  // the calling thread's: before it queues anything
void note_profiler(bool on);
void forget_askers();  // when a budget opens

}  // namespace memmgr::pager
