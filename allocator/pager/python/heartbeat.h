// A rank's sign of life for the other ranks of its job: a thread that needs no GIL reports to the store that the
// process runs.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string>

namespace memmgr::pager {

// Writes a count and the floor in bytes to `key` every so many seconds, until end_beat(). `store` is a c10d PrefixStore
// whose own store is C++. False: this torch has no stores.
bool begin_beat(PyObject* store, const std::string& key, double seconds);
void end_beat();
uint64_t beats_answered();  // how many reports of the last begin_beat() the store has confirmed

}  // namespace memmgr::pager
