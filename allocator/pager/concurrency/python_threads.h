// What the threads besides this one do, as far as Python and the system can tell.
#pragma once

#include <Python.h>

#include <string_view>

namespace memmgr::pager {

enum class Elsewhere {
  kWaits,      // every other thread waits for somebody
  kRuns,       // one runs, and none puts gradients in place
  kGradients,  // one does, or may: nobody else reads any
};

// With the GIL, which is not let go of: the answer holds until the caller lets go.
Elsewhere elsewhere();

// Raises it in that thread if what runs there is a function of this package's. What Python's collector runs there in
// between, finalizers of the user's, is none: they would be cut short. Has it been raised? With the GIL.
bool raise_in(unsigned long thread, PyObject* exception, std::string_view package);

// Where a budget opens, an op of another thread may have begun before it: nobody has pinned what it reads. From here on
// nothing leaves until each thread has begun another op, or another call, or sleeps, or has ended. With the GIL.
void let_others_end_their_ops();
// The GIL is let go of for a moment, for calls of Python's that end at once.
void give_others_a_moment();
// Nothing leaves because of them. Asked by whoever needs room; without the GIL.
bool others_are_in_their_ops();
void forget_others();

}  // namespace memmgr::pager
