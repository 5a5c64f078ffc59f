// The activity of other threads, as far as Python and the system record it.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string_view>

namespace memmgr::pager {

class Pool;

// A thread that may sleep, with its state at the last look.
struct Sleeper {
  unsigned long system_thread;
  uint64_t looked_ns = 0, ran_ns = 0;  // when it was last seen to run; the processor's time until then
};
// It has ended, or it has slept for so long with next to nothing done.
bool rests(Sleeper* thread, uint64_t now, uint64_t long_ns);

enum class Elsewhere {
  kWaits,      // every other thread waits for a thread or a peer
  kRuns,       // one runs, and none sets gradients
  kGradients,  // one sets gradients, or may: other threads read none
};

// A thread whose innermost frame runs this Python function sleeps until another thread, or a peer, wakes it. With the
// GIL.
void sleeps_in(PyObject* function);
// A thread that has this Python function among its frames sets gradients. With the GIL.
void sets_gradients_in(PyObject* function);

// With the GIL. The answer holds until the caller releases it.
Elsewhere elsewhere();

// Raises the exception in that thread if a function of this package runs there. A finalizer of the user's, which
// Python's collector runs in between, is no such function: it would be cut short. True: the exception was raised. With
// the GIL.
bool raise_in(unsigned long thread, PyObject* exception, std::string_view package);

// An op of another thread may have begun before the budget opened, without pins on its arguments. Freezes eviction
// until each thread has begun another op or another call, or sleeps, or has ended, and until the pool's device has run
// the work that those ops queued. With the GIL.
void let_others_end_their_ops(Pool* pool);
// Releases the GIL for a moment, for Python calls that end at once.
void give_others_a_moment();
// Returns true while other threads' ops freeze eviction. Called by requests for room, without the GIL.
bool others_are_in_their_ops();
void forget_others();

}  // namespace memmgr::pager
