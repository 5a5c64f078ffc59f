// A rank's sign of life, for the others of its job: a thread that needs no GIL says in the store that the process runs.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string>

namespace memmgr::pager {

// Every so many seconds `key` gets a count and the floor in bytes, until end_beat(). `store` is a c10d PrefixStore
// whose own store is C++. False: this torch has no stores.
bool begin_beat(PyObject* store, const std::string& key, double seconds);
void end_beat();
uint64_t beats_answered();  // of those that have begun last: as often the store has said that it has got them

}  // namespace memmgr::pager
