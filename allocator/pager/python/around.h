// A callable of Python that runs another one between two functions of ours, without a frame: errors and warnings of the
// program name the program's lines.
#pragma once

#include "python/bind.h"

namespace memmgr::pager {

// `around(original, enter)`: a call calls `enter` with its arguments, then `original`. A result of `enter` that is
// callable is called at the end with the result of `original` and its error, one of which is None; it may raise another
// error. Any other result is kept until then. Bound to an object as functions of Python are.
void bind_around(Module& m);

}  // namespace memmgr::pager
