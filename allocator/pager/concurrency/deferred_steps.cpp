#include "concurrency/deferred_steps.h"

#include <ATen/ThreadLocalState.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StreamGuard.h>
#include <signal.h>
#include <sys/syscall.h>
#include <torch/csrc/Exceptions.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <memory>
#include <thread>
#include <unordered_map>

#include "base/gil.h"
#include "base/lock.h"
#include "base/no_destructor.h"
#include "base/thread_state.h"
#include "cells/cell.h"
#include "cells/stream_order.h"
#include "cells/types.h"
#include "ops/numerics.h"
#include "pools/pool.h"
#include "pools/stream_rules.h"

namespace memmgr::pager {

std::atomic<int> pending_slices{0};

namespace {

struct Slice {
  PyObject* run;                                          // counted
  std::unordered_map<c10::StorageImpl*, size_t> tensors;  // how many tensors the slice has of each storage
  at::ThreadLocalState state;  // grad mode, autocast, functorch, modes: as they were in the step
  int numerics = numerics_now();
  std::optional<c10::Stream> stream{};  // the only stream of the program
  std::thread::id runner{};             // set: the slice runs
  std::exception_ptr failure{};         // set: the slice has failed, and the error is still to be raised
};
using SlicePtr = std::shared_ptr<Slice>;

struct Pending {
  Lock& lock = lock_of(LockId::kSteps);
  Condition ended;
  std::unordered_map<c10::StorageImpl*, SlicePtr> of_storage GUARDED_BY(lock);
  bool may_wait GUARDED_BY(lock) = false;
  std::atomic<uint64_t> queued{0}, settled{0};  // slices on an accelerator
};

NoDestructor<Pending> pending;

void end(const SlicePtr& slice) {
  {
    const Hold lock(pending->lock);
    for (const auto& [s, n] : slice->tensors) pending->of_storage.erase(s);
  }
  pending_slices--;
  pending->ended.notify_all();
}

// Claims the slice for this thread. Waits if another thread runs it. False: it has ended, or this thread runs it
// already.
bool begin(const SlicePtr& slice) {
  const auto waits = [&]() REQUIRES(pending->lock) {
    const auto found = pending->of_storage.find(slice->tensors.begin()->first);
    return found != pending->of_storage.end() && found->second == slice;
  };
  std::optional<WithoutGil> free;
  Hold lock(pending->lock);  // ends before the GIL is taken
  while (waits()) {
    if (slice->runner == std::this_thread::get_id()) return false;
    if (slice->runner == std::thread::id()) {
      slice->runner = std::this_thread::get_id();
      return true;
    }
    if (!free) {
      lock.unlock();
      free.emplace();
      lock.lock();
    } else {
      pending->ended.wait(lock);
    }
  }
  return false;
}

// A Python handler may raise (Ctrl-C, an alarm, DataLoader's for dead workers). Inside a slice it would leave a step
// half done that the program believes done, so signals wait until the slice has ended. Python handles them in its main
// thread.
constexpr int kSignals[] = {SIGINT,  SIGTERM, SIGHUP,  SIGQUIT,   SIGALRM, SIGCHLD,
                            SIGUSR1, SIGUSR2, SIGXCPU, SIGVTALRM, SIGPROF, SIGIO};
struct sigaction handlers[NSIG];
volatile sig_atomic_t came[NSIG];
pid_t deferring = 0;

void defer(int number) {
  if (getpid() == deferring)
    came[number] = 1;
  else  // a child that another thread has forked in between
    handlers[number].sa_handler(number);
}

class SignalsWait {
 public:
  SignalsWait() {
    if (syscall(SYS_gettid) != getpid() || deferring == getpid()) return;
    outermost_ = true;
    deferring = getpid();
    for (const int number : kSignals) {
      struct sigaction& now = handlers[number];
      if (sigaction(number, nullptr, &now) != 0 || now.sa_flags & SA_SIGINFO) continue;
      if (now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN) continue;
      struct sigaction later = now;
      later.sa_handler = defer;
      if (sigaction(number, &later, nullptr) == 0) deferred_.push_back(number);
    }
  }
  ~SignalsWait() {
    for (const int number : deferred_) sigaction(number, &handlers[number], nullptr);
    if (outermost_) deferring = 0;
    for (const int number : deferred_) {
      const bool again = came[number];
      came[number] = 0;
      if (again) raise(number);
    }
  }

 private:
  bool outermost_ = false;
  c10::SmallVector<int, std::size(kSignals)> deferred_;
};

// Runs the slice. Returns the exception that it has thrown.
std::exception_ptr run(const SlicePtr& slice) {
  const PyGILState_STATE gil = PyGILState_Ensure();
  const SignalsWait signals_wait;
  const auto thrown = [] {
    python_error error;
    error.persist();
    return std::make_exception_ptr(error);
  };
  std::exception_ptr failure;
  if (PyErr_CheckSignals() != 0) failure = thrown();  // by a signal that came before
  PyObject* result;
  {
    const NotCompiled not_compiled;
    at::ThreadLocalStateGuard as_it_was(slice->state);
    NumericsGuard numerics(slice->numerics);
    c10::OptionalStreamGuard stream;
    if (slice->stream && rule_holds(kRuleWhere)) stream.reset_stream(*slice->stream);
    const int regions = std::exchange(tl_regions, 0);  // the slice is no code of a compiled graph
    const uint64_t forward = std::exchange(tl_compiled_forward, 0);
    result = PyObject_CallNoArgs(slice->run);
    tl_compiled_forward = forward;
    tl_regions = regions;
  }
  if (!result) failure = thrown();
  Py_XDECREF(result);
  Py_CLEAR(slice->run);
  PyGILState_Release(gil);
  return failure;
}

// Runs a slice once, in the thread that needs it first. A slice that fails has ended: like a step that fails half way
// it has changed some of its tensors, and a second run would change these twice. `quietly`: the caller cannot throw, so
// the next one that needs the slice throws.
void finish(const SlicePtr& slice, bool quietly = false) {
  if (!begin(slice)) return;
  std::exception_ptr failure = slice->failure ? slice->failure : run(slice);
  if (failure && quietly) {
    const Hold lock(pending->lock);
    slice->failure = failure;
    slice->runner = {};
    pending->ended.notify_all();
    return;
  }
  if (slice->stream) pending->queued++;
  end(slice);
  if (failure) std::rethrow_exception(failure);
}

// Orders this thread's work after the slices: they are on its stream, or the CPU waits for them.
void come_after_slices(const Session& session) {
  if (queues && session.pool->stream() != session.pool->opened_on()) settle_late_slices(session);
}

void finish_each(const Session& session, const c10::SmallVector<SlicePtr, 4>& slices) {
  for (const SlicePtr& slice : slices) finish(slice);
  if (!slices.empty()) come_after_slices(session);
}

void collect_locked(c10::StorageImpl* s, c10::SmallVector<SlicePtr, 4>* found) REQUIRES(pending->lock) {
  const auto it = pending->of_storage.find(s);
  if (it != pending->of_storage.end() && std::find(found->begin(), found->end(), it->second) == found->end())
    found->push_back(it->second);
}

void collect_locked(const c10::IValue& v, c10::SmallVector<SlicePtr, 4>* found) REQUIRES(pending->lock) {
  const auto collect = [&](c10::StorageImpl* s) NOT_ANALYZED { collect_locked(s, found); };  // runs under the lock
  each_tensor(v, [&](c10::TensorImpl* t) { each_storage(t, collect); }, collect);
}

template <class What>
void finish_of(const Session& session, const What& what) {
  if (C10_LIKELY(pending_slices.load(std::memory_order_relaxed) == 0)) return;
  c10::SmallVector<SlicePtr, 4> found;
  {
    const Hold lock(pending->lock);
    collect_locked(what, &found);
  }
  finish_each(session, found);
}

// Returns true if every reader of the bytes is an op or a guarded reader. A holder of an address has a pin, too.
bool is_watched(const Session& session, const c10::StorageImpl* s) {
  if (!s->device().is_cpu() && s->device() != session.pool->device) return false;
  const Hold lock(graph_lock());
  if (const Cell* c = cell_of(s)) return (c->state.load() & kPinMask) == 0;
  const auto deleter = pointer_of(s).get_deleter();
  return deleter == session.pool->deleter() || deleter == c10::GetDefaultCPUAllocator()->raw_deleter();
}

}  // namespace

bool add_pending(Session& session, PyObject* run, const std::vector<StoragePtr>& storages) {
  auto slice = std::make_shared<Slice>();
  for (const StoragePtr& s : storages) {
    if (!s || !is_watched(session, s.get())) return false;
    ++slice->tensors[s.get()];
  }
  if (storages.empty()) return false;
  if (queues) {
    const c10::Device device = session.pool->device;
    slice->stream = c10::impl::getDeviceGuardImpl(device.type())->getStream(device);
  }
  for (;;) {  // other threads may add slices while these end
    c10::SmallVector<SlicePtr, 4> before;
    {
      const Hold lock(pending->lock);
      if (!pending->may_wait) return false;
      if (queues && (several_streams.load() || session.pool->stream() != session.pool->opened_on())) return false;
      for (const auto& [s, n] : slice->tensors) collect_locked(s, &before);
      if (before.empty()) {
        Py_INCREF(run);
        slice->run = run;
        for (const auto& [s, n] : slice->tensors) pending->of_storage.emplace(s, slice);
        session.counters.pending_slices++;
        pending_slices++;
        return true;
      }
    }
    finish_each(session, before);
  }
}

void let_slices_wait(bool on) {
  const Hold lock(pending->lock);
  pending->may_wait = on;
}

void finish_pending_of(const Session& session, const c10::IValue& value) { finish_of(session, value); }
void finish_pending_of(const Session& session, c10::StorageImpl* s) { finish_of(session, s); }

void drop_unread_pending() {
  if (C10_LIKELY(pending_slices.load(std::memory_order_relaxed) == 0)) return;
  c10::SmallVector<SlicePtr, 4> unread;
  {
    const Hold lock(pending->lock);
    for (const auto& [storage, slice] : pending->of_storage) {
      if (slice->runner != std::thread::id() || slice->tensors.begin()->first != storage) continue;
      const auto ours = [](const auto& t) { return c10::raw::intrusive_ptr::use_count(t.first) == t.second; };
      if (!std::all_of(slice->tensors.begin(), slice->tensors.end(), ours)) continue;
      slice->runner = std::this_thread::get_id();  // no thread begins it now
      unread.push_back(slice);
    }
  }
  for (const SlicePtr& slice : unread) {
    end(slice);
    Py_CLEAR(slice->run);
  }
}

void finish_all_pending(const Session& session, bool quietly) {
  std::exception_ptr failure;
  while (pending_slices.load() > 0) {
    SlicePtr next;
    {
      const Hold lock(pending->lock);
      for (const auto& [storage, slice] : pending->of_storage)
        if (slice->runner != std::this_thread::get_id() && !(quietly && slice->failure)) next = slice;
    }
    if (!next) break;
    try {
      finish(next, quietly);
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  come_after_slices(session);
  if (failure) std::rethrow_exception(failure);
}

void settle_late_slices(const Session& session) {
  const uint64_t queued = pending->queued.load();
  if (C10_LIKELY(queued == pending->settled.load()) || !rule_holds(kRuleLate)) return;
  session.pool->settle();
  pending->settled = queued;  // a smaller value from another thread costs one more wait
}

}  // namespace memmgr::pager
