// Pending slices: parts of optimizers' steps that wait until somebody needs what they write.
#pragma once

#include <ATen/core/ivalue.h>
#include <Python.h>

#include <atomic>
#include <vector>

#include "base/tensors.h"

namespace memmgr::pager {

// How many wait, or are under way. Nobody looks further while there are none.
extern std::atomic<int> pending_slices;

// `run` is called once, with torch's thread state as it is now, before an op, a reader or a write of any thread meets
// one of these storages: one for every tensor that `run` holds, and keeps alive. Slices that have met one of them
// already end first. The GIL is held. False: somebody may have an address of one, so that its readers cannot be seen,
// or the budget ends; nothing is noted.
bool add_pending(PyObject* run, const std::vector<StoragePtr>& storages);
// Whether slices may wait from here on: not once a budget ends.
void let_slices_wait(bool on);

// Those end that hold one of these; whoever runs one now is waited for. Throws what it has thrown.
void finish_pending_of(const c10::IValue& value);
void finish_pending_of(c10::StorageImpl* s);
// All of them, also where one of them fails. Quietly: for who cannot throw; whoever needs what has failed is told.
void finish_all_pending(bool quietly = false);

// On an accelerator a slice is queued after the step has ended, and a program that puts its streams in order behind the
// step knows nothing of that. So slices wait only while there is one stream, and are queued there; when a second one
// appears (`several_streams`), or somebody gets an address, the CPU waits until those that ran late are over.
void settle_late_slices();

// What nobody else holds nobody will read: a model that has gone with its optimizer does not stay for its last step.
// The GIL is held.
void drop_unread_pending();

}  // namespace memmgr::pager
