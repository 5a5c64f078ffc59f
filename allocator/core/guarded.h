// Common parts of the C ABI: no exception of C++ passes it, and texts are cut to the caller's room.
#pragma once

#include <stdio.h>

#include <new>
#include <string>

namespace memmgr {

// Memmgr's own bookkeeping found no memory: the caller gets the same answer as when the managed memory has ended.
template <typename Result, typename Body>
Result Guarded(Result when_out_of_memory, Body body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return when_out_of_memory;
  }
}

inline void Say(const std::string& text, char* err, size_t err_len) {
  if (err != nullptr && err_len > 0) snprintf(err, err_len, "%s", text.c_str());
}

}  // namespace memmgr
