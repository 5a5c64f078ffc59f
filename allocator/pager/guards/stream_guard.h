// Readers that take addresses outside of ops: threads on a second stream, and profilers (rule 9).
#pragma once

namespace memmgr::pager {

struct Session;

void note_stream(const Session& session);  // notes the calling thread's stream, before the thread queues work
void note_profiler(bool on);
void forget_askers();  // when a budget opens

}  // namespace memmgr::pager
