#include "threads.h"

#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pthread.h>

#include <cstring>

#include "budget.h"
#include "kernel.h"
#include "recipe.h"
#include "reclaim.h"

namespace memmgr::pager {

thread_local int tl_depth = 0;
thread_local int tl_regions = 0;
thread_local int tl_readers = 0;

namespace {

// The first op of a thread that we have not met, whose arguments nobody shows us (asking for them would cost every op
// of every thread 0.5 us): while it runs nothing leaves, all that was away is back, and all that it may have written to
// counts as written. From its next op on the thread is seen.
struct Unseen final : at::ObserverContext {
  Unseen() { nothing_leaves(true); }
  ~Unseen() override { nothing_leaves(false); }
};

std::vector<std::pair<Cell*, StoragePtr>> hold_all() {
  std::vector<std::pair<Cell*, StoragePtr>> held;
  std::lock_guard<std::mutex> lock(graph_lock());
  for_each_cell_locked([&](Cell* c) {
    if (c->storage._unsafe_get_target())
      if (StoragePtr s = hold(c)) held.emplace_back(c, std::move(s));
  });
  return held;
}

std::unique_ptr<at::ObserverContext> unseen_op_begins(const at::RecordFunction&) {
  if (C10_LIKELY(thread_is_seen()) || tl_depth > 0 || tl_running_recipes > 0 || !budget.open.load()) return nullptr;
  if (at::in_parallel_region()) return nullptr;  // a piece of an op that is under way elsewhere
  if (is_backends_thread()) return nullptr;
  see_this_thread(true);
  counters.unseen_ops++;
  Depth inside;
  auto unseen = std::make_unique<Unseen>();
  auto all = hold_all();
  // What is there first: it may be written to at once. What finds no room to come back stays away, and the trap says so
  // if the op reads it; an observer's exception would be lost.
  for (const bool away : {false, true})
    for (auto& [c, s] : all) {
      if (c->resident() == away) continue;
      pin(c, ticks());
      try {
        bring_back(c);
        begin_new_version(c);
      } catch (const std::exception&) {
      }
      unpin(c);
    }
  for (auto& [c, s] : all) drop_later(std::move(s));
  return unseen;
}

at::CallbackHandle net = at::INVALID_CALLBACK_HANDLE;

}  // namespace

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

void catch_unseen_threads(bool on) {
  if (on && net == at::INVALID_CALLBACK_HANDLE) {
    net = at::addGlobalCallback(at::RecordFunctionCallback(&unseen_op_begins).scopes({at::RecordScope::FUNCTION}));
  } else if (!on && net != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(net);
    net = at::INVALID_CALLBACK_HANDLE;
  }
}

}  // namespace memmgr::pager
