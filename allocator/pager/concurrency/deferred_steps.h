// Pending slices: parts of optimizers' steps that wait until a thread needs the tensors that they write.
#pragma once

#include <ATen/core/ivalue.h>
#include <Python.h>

#include <atomic>
#include <vector>

#include "base/session.h"
#include "base/tensors.h"

namespace memmgr::pager {

// How many slices wait or run. 0: no thread looks further.
extern std::atomic<int> pending_slices;

// Registers a slice. `run` is called once, with torch's thread state as it is now, before an op, a reader or a write of
// any thread uses one of these storages. `storages` has one for every tensor that `run` holds, and is kept alive by it.
// Earlier slices with one of these storages end first. The GIL is held. False: a storage's address may have been handed
// out, so that its readers are not seen, or the budget ends. Nothing is registered then.
bool add_pending(Session& session, PyObject* run, const std::vector<StoragePtr>& storages);
// False: slices wait no longer, as when a budget ends.
void let_slices_wait(bool on);

// Runs the slices that have one of these storages, and waits for those that another thread runs. Throws their
// exceptions.
void finish_pending_of(const Session& session, const c10::IValue& value);
void finish_pending_of(const Session& session, c10::StorageImpl* s);
// Runs all slices, also if one fails. Quietly: for a caller that cannot throw; the next thread that needs a failed
// slice throws.
void finish_all_pending(const Session& session, bool quietly = false);

// On an accelerator a slice is queued after the step has ended. A program that orders its streams after the step does
// not order them after the slice. So slices wait only while there is one stream, and are queued on that. When a second
// stream appears (`several_streams`), or an address is handed out, the CPU waits until the late slices have ended.
void settle_late_slices(const Session& session);

// Drops slices whose tensors have no other owner, since no thread can read them: a model that ends with its optimizer
// is not kept for its last step. The GIL is held.
void drop_unread_pending();

}  // namespace memmgr::pager
