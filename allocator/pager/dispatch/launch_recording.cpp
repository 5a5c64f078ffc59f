#include "dispatch/launch_recording.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "base/constants.h"
#include "base/forked_child.h"
#include "base/lock.h"
#include "base/tensors.h"
#include "base/thread_state.h"
#include "cells/adoption.h"
#include "cells/cell.h"
#include "dispatch/the_session.h"
#include "pools/capturing.h"
#include "pools/pool.h"
#include "pools/stream_rules.h"

namespace memmgr::pager {

LaunchRecording::LaunchRecording(const LaunchedKernel& kernel, bool outermost)
    : kernel_(kernel),
      on_(tl_compiled_forward && outermost &&
          (kernel.info->function.load(std::memory_order_relaxed) || kernel.info->run.load(std::memory_order_relaxed)) &&
          !tl_foreign && !forked_child && !captures.load()) {}

void LaunchRecording::read_all(Positional args) {
  on_ = read_arguments(args);
  for (const KernelArgument& a : arguments_) {
    if (!on_ || !a.written) continue;
    c10::StorageImpl* s = a.tensor->unsafe_storage().unsafeGetStorageImpl();
    if (!cell_of(s) && s->nbytes() < the_session.options.small_bytes && adoptable(the_session, s))
      adopt(the_session, s);
  }
}

bool LaunchRecording::read_arguments(Positional args) {
  if (args.size() != kernel_.args.size()) return false;
  for (size_t i = 0; i < args.size(); ++i) {
    PyObject* o = args[i];
    KernelArgument& a = arguments_.emplace_back();
    a.written = kernel_.args[i] == kArgumentWritten;
    if (kernel_.args[i] != kArgumentNumber) {
      if (!THPVariable_Check(o) || !THPVariable_Unpack(o).has_storage()) return false;
      a.tensor = THPVariable_Unpack(o).unsafeGetTensorImpl();
      continue;
    }
    if (!PyLong_CheckExact(o)) return false;
    int overflow = 0;
    a.number = PyLong_AsLongLongAndOverflow(o, &overflow);
    if (overflow) return false;
  }
  return true;
}

void LaunchRecording::record(const Frame& frame) {
  recording_.begin(describe_launch(the_session, kernel_.info, arguments_));
  if (!recording_.recipe()) return;
  // Only the host clears gaps before a launch.
  if (!the_session.pool->on_host() && recording_.recipe()->kind->clears.load(std::memory_order_relaxed))
    return recording_.give_up();
  for (const KernelArgument& a : arguments_)
    if (a.written) note_written(a.tensor->unsafe_storage().unsafeGetStorageImpl());
  if (C10_UNLIKELY(recording_.is_new())) recording_.copy_written();
}

void LaunchRecording::give_up() {
  recording_.give_up();
  written_.clear();
}

void LaunchRecording::zero_gaps() {
  if (C10_LIKELY(!recording_.recipe()->kind->clears.load(std::memory_order_relaxed))) return;
  size_t at = 0;
  for (const TensorArg& a : recording_.recipe()->tensors) {
    if (a.role == ArgumentRole::kFresh) std::memset(pointer_of(written_[at]).get(), 0, a.storage_bytes);
    at += a.role == ArgumentRole::kFresh || a.role == ArgumentRole::kWritten;
  }
}

double LaunchRecording::check_and_attach(double seconds) {
  c10::SmallVector<Version*, 8> versions;
  c10::SmallVector<c10::StorageImpl*, 8> made;
  bool any = false;
  uint64_t bytes = 0;
  {
    const Hold lock(graph_lock());
    for (c10::StorageImpl* s : written_) {
      const Cell* c = cell_of(s);
      const bool large = c && !c->small;  // a small one stays in memory
      versions.push_back(large ? c->version : nullptr);
      made.push_back(large ? s : nullptr);
      any |= large;
      bytes += s->nbytes();
    }
  }
  if (!any) {
    recording_.give_up();
    return seconds;
  }
  recording_.note_run(seconds);
  recording_.check(made, bytes);
  // A queued launch has hardly begun: the determinism check has timed it.
  if (queues) seconds = std::max(seconds, recording_.recipe()->kind->seconds.load(std::memory_order_relaxed));
  recording_.attach_if_trusted(versions);
  return seconds;
}

void LaunchRecording::note_written(c10::StorageImpl* s) {
  if (std::find(written_.begin(), written_.end(), s) == written_.end() && s->nbytes() > 0) written_.push_back(s);
}

}  // namespace memmgr::pager
