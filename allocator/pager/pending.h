// Pending slices: parts of optimizers' steps that wait until somebody needs what they write.
#pragma once

#include <ATen/core/ivalue.h>
#include <Python.h>

#include <atomic>
#include <vector>

#include "cell.h"

namespace memmgr::pager {

// How many wait, or are under way. Nobody looks further while there are none.
extern std::atomic<int> pending_slices;

// Written and read by the slice; a storage once for every tensor that the slice holds of it.
struct SliceStorages {
  std::vector<StoragePtr> written, read;
};

// `run` is called once, with torch's thread state as it is now, before an op, a reader or a write of any thread meets
// one of these storages. It keeps them alive. Slices that have met one of them already end first. The GIL is held.
// False: an address of one has been handed out, so that its readers cannot be seen, and nothing is noted.
bool add_pending(PyObject* run, const SliceStorages& storages);

// Those end that hold one of these; whoever runs one now is waited for. Throws what it has thrown.
void finish_pending_of(const c10::IValue& value);
void finish_pending_of(c10::StorageImpl* s);
void finish_all_pending();

// What nobody else holds nobody will read: a model that has gone with its optimizer does not stay for its last step.
// The GIL is held.
void drop_unread_pending();

}  // namespace memmgr::pager
