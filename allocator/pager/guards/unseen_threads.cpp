#include "guards/unseen_threads.h"

#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <linux/membarrier.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "base/budget.h"
#include "cells/deferred_drop.h"
#include "concurrency/deferred_steps.h"
#include "dispatch/kernel.h"
#include "python/fork.h"
#include "recipes/recipe.h"
#include "residency/reclaim.h"

namespace memmgr::pager {

thread_local int tl_depth = 0;
thread_local int tl_regions = 0;
thread_local bool tl_making_states = false;
thread_local int tl_readers = 0;

thread_local KernelSlot* tl_kernel_slot = nullptr;
bool fence_in_kernel = false;

namespace {

struct KernelSlots {
  std::mutex& lock = taken_by_forks(new std::mutex);
  std::vector<KernelSlot*> all;
  uint64_t ops_of_ended = 0;
};

KernelSlots& kernel_slots() {
  static auto* s = new KernelSlots;
  return *s;
}

struct OwnSlot {
  KernelSlot slot;
  OwnSlot() {
    slot.system_thread = static_cast<unsigned long>(syscall(SYS_gettid));
    std::lock_guard<std::mutex> lock(kernel_slots().lock);
    kernel_slots().all.push_back(&slot);
  }
  ~OwnSlot() {
    std::lock_guard<std::mutex> lock(kernel_slots().lock);
    auto& all = kernel_slots().all;
    kernel_slots().ops_of_ended += slot.ops.load();
    all.erase(std::remove(all.begin(), all.end(), &slot), all.end());
    tl_kernel_slot = nullptr;
  }
};

}  // namespace

KernelSlot* new_kernel_slot() {
  static thread_local OwnSlot own;
  static thread_local KernelSlot late;  // for ops of a thread's own ending, after its slot: nobody waits for these
  static thread_local bool ended = false;
  struct Mark {
    ~Mark() { ended = true; }
  };
  static thread_local Mark mark;
  (void)mark;
  return tl_kernel_slot = ended ? &late : &own.slot;
}

uint64_t ops_counted() {
  std::lock_guard<std::mutex> lock(kernel_slots().lock);
  uint64_t ops = kernel_slots().ops_of_ended;
  for (const KernelSlot* s : kernel_slots().all) ops += s->ops.load(std::memory_order_relaxed);
  return ops;
}

uint64_t ops_counted_of(unsigned long system_thread) {
  std::lock_guard<std::mutex> lock(kernel_slots().lock);
  for (const KernelSlot* s : kernel_slots().all)
    if (s->system_thread == system_thread) return s->ops.load(std::memory_order_relaxed);
  return 0;
}

void prepare_for_waiting() {
  static const bool registered = syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0;
  if (!registered) fence_in_kernel = true;
}

bool wait_until_kernel_is_left(double seconds) {
  if (!fence_in_kernel) syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0);
  const uint64_t until = now_ns() + static_cast<uint64_t>(seconds * 1e9);
  for (;;) {
    bool inside = false;
    {
      std::lock_guard<std::mutex> lock(kernel_slots().lock);
      for (const KernelSlot* s : kernel_slots().all)
        inside |= s != tl_kernel_slot && s->inside.load(std::memory_order_acquire) > 0;
    }
    if (!inside) return true;
    if (now_ns() > until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

namespace {

// The first op of a thread that we have not met, whose arguments nobody shows us (asking for them would cost every op
// of every thread 0.5 us): while it runs nothing leaves, all that was away is back, and all that it may have written to
// counts as written. From its next op on the thread is seen.
struct Unseen final : at::ObserverContext {
  Unseen() { nothing_leaves(true); }
  ~Unseen() override { nothing_leaves(false); }
};

// The one that was touched last first.
std::vector<std::pair<Cell*, StoragePtr>> hold_all() {
  std::vector<std::pair<uint64_t, std::pair<Cell*, StoragePtr>>> found;  // with when that was: others go on touching
  {
    std::lock_guard<std::mutex> lock(graph_lock());
    for_each_cell_locked([&](Cell* c) {
      if (c->storage._unsafe_get_target())
        if (StoragePtr s = hold(c)) found.push_back({c->last_touch.load(std::memory_order_relaxed), {c, std::move(s)}});
    });
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<std::pair<Cell*, StoragePtr>> held;
  for (auto& [touched, cell] : found) held.push_back(std::move(cell));
  return held;
}

std::unique_ptr<at::ObserverContext> unseen_op_begins(const at::RecordFunction&) {
  if (C10_LIKELY(thread_is_seen()) || tl_depth > 0 || tl_running_recipes > 0 || !budget.open.load()) return nullptr;
  if (at::in_parallel_region()) return nullptr;  // a piece of an op that is under way elsewhere
  if (is_backends_thread()) return nullptr;
  see_this_thread(true);
  counters.unseen_ops++;
  finish_all_pending(true);
  Depth inside;
  auto unseen = std::make_unique<Unseen>();
  auto all = hold_all();
  // What is there first: it may be written to at once. Then what was used last, up to the room of one more like the
  // largest, for what the op makes. What finds no room stays away, and the trap says so if the op reads it; an
  // observer's exception would be lost.
  uint64_t largest = 0;
  for (const auto& [c, s] : all) largest = std::max(largest, c->nbytes);
  for (const bool away : {false, true})
    for (auto& [c, s] : all) {
      if (c->resident() == away) continue;
      if (away && mm_arena_resident(budget.arena) + c->nbytes + largest > mm_arena_budget(budget.arena)) continue;
      pin(c, ticks());
      try {
        bring_back(c);
        begin_new_version(c);
      } catch (const std::exception&) {
      }
      unpin(c);
    }
  for (auto& [c, s] : all) drop(std::move(s));
  return unseen;
}

at::CallbackHandle net = at::INVALID_CALLBACK_HANDLE;

// Dynamo's own switch, of this thread: what compiles frames, or None. Gives what it was.
PyObject* compile_frames_with(PyObject* callback) {
  PyObject* dynamo = PyImport_ImportModule("torch._C._dynamo.eval_frame");
  PyObject* before = dynamo ? PyObject_CallMethod(dynamo, "set_eval_frame", "O", callback) : nullptr;
  if (!before) PyErr_Clear();
  Py_XDECREF(dynamo);
  return before;
}

}  // namespace

NotCompiled::NotCompiled() : before_(compile_frames_with(Py_None)) {}

NotCompiled::~NotCompiled() {
  if (before_ && before_ != Py_None) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Py_XDECREF(compile_frames_with(before_));
    PyErr_Restore(type, value, trace);
  }
  Py_XDECREF(before_);
}

bool is_backends_thread() {
  static thread_local const bool is = [] {
    char name[16] = {};
    return pthread_getname_np(pthread_self(), name, sizeof name) == 0 &&
           (!strncmp(name, "pt_gloo", 7) || !strncmp(name, "pt_nccl", 7) || !strncmp(name, "pt_ucc", 6) ||
            !strncmp(name, "pt_mpi", 6));
  }();
  return is;
}

void see_this_thread(bool on) { c10::impl::tls_set_dispatch_key_included(kKey, on); }

bool thread_is_seen() { return c10::impl::tls_is_dispatch_key_included(kKey); }

std::atomic<uint32_t> listeners{0};
static thread_local bool tl_may_rest = false, tl_resting = false;

void follow_listeners() {
  const bool rest = tl_may_rest && listeners.load() == 0;
  if (rest == tl_resting) return;
  at::enableRecordFunction(!rest);
  tl_resting = rest;
}

void listen(Listener who, bool on) {
  if (on)
    listeners |= who;
  else
    listeners &= ~static_cast<uint32_t>(who);
  follow_listeners();
}

// Not inside of a guard of the dispatcher's keys, whose end would put back what it has found: an unseen thread.
void let_callbacks_rest(bool on) {
  if (on) {
    const auto keys = c10::impl::tls_local_dispatch_key_set().included_;
    tl_may_rest = at::isRecordFunctionEnabled() && keys.remove(kKey) == c10::default_included_set;
    follow_listeners();
  } else if (tl_may_rest) {
    tl_may_rest = tl_resting = false;
    at::enableRecordFunction(true);
  }
}

void catch_unseen_threads(bool on) {
  if (on && net == at::INVALID_CALLBACK_HANDLE) {
    net = at::addGlobalCallback(at::RecordFunctionCallback(&unseen_op_begins).scopes({at::RecordScope::FUNCTION}));
  } else if (!on && net != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(net);
    net = at::INVALID_CALLBACK_HANDLE;
  }
}

}  // namespace memmgr::pager
