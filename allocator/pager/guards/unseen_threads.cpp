#include "guards/unseen_threads.h"

#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <linux/membarrier.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/deferred_drop.h"
#include "base/lock.h"
#include "base/seen_threads.h"
#include "base/session.h"
#include "base/tensors.h"
#include "base/thread_state.h"
#include "cells/cell.h"
#include "cells/freeze.h"
#include "cells/lifetime.h"
#include "cells/types.h"
#include "cells/version.h"
#include "concurrency/deferred_steps.h"
#include "residency/restore.h"

namespace memmgr::pager {

namespace {

// The first op of a thread that the pager has not seen. Its arguments are not known (to be shown them would cost every
// op of every thread 0.5 us). While it runs eviction is frozen and absent cells are restored, and every cell counts as
// written. The thread's next op is seen.
struct Unseen final : at::ObserverContext {
  Unseen() { freeze_evictions(true); }
  ~Unseen() override { freeze_evictions(false); }
};

// Returns all cells, the one that was touched last first.
std::vector<std::pair<Cell*, StoragePtr>> hold_all() {
  // Cells with the time of their last touch, which other threads go on changing.
  std::vector<std::pair<uint64_t, std::pair<Cell*, StoragePtr>>> found;
  {
    const Hold lock(graph_lock());
    for_each_cell_locked([&](Cell* c) REQUIRES(graph_lock()) {
      if (c->storage._unsafe_get_target())
        if (StoragePtr s = hold(c)) found.push_back({c->last_touch.load(std::memory_order_relaxed), {c, std::move(s)}});
    });
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<std::pair<Cell*, StoragePtr>> held;
  for (auto& [touched, cell] : found) held.push_back(std::move(cell));
  return held;
}

// Torch's callbacks have no argument of their own. Set before the net is registered, and read by threads that still run
// the callback after it was removed.
std::atomic<Session*> session_of_net{nullptr};

std::unique_ptr<at::ObserverContext> unseen_op_begins(const at::RecordFunction&) {
  if (C10_LIKELY(thread_is_seen()) || tl_depth > 0 || tl_running_recipes > 0) return nullptr;
  Session& session = *session_of_net.load(std::memory_order_relaxed);
  if (!session.open.load()) return nullptr;
  if (at::in_parallel_region()) return nullptr;  // a part of an op that another thread runs
  if (is_backends_thread()) return nullptr;
  see_this_thread(true);
  session.counters.unseen_ops++;
  finish_all_pending(session, true);
  Depth inside;
  auto unseen = std::make_unique<Unseen>();
  auto all = hold_all();
  // Resident cells come first: the op may write to them at once. Absent cells follow, the one that was used last first,
  // up to the room of one more cell like the largest, for the op's outputs. A cell that finds no room stays absent: the
  // trap raises if the op reads it. An observer's exception would be lost.
  uint64_t largest = 0;
  for (const auto& [c, s] : all) largest = std::max(largest, c->nbytes);
  for (const bool away : {false, true})
    for (auto& [c, s] : all) {
      if (c->resident() == away) continue;
      if (away && mm_arena_resident(session.arena) + c->nbytes + largest > mm_arena_budget(session.arena)) continue;
      pin(c, ticks());
      try {
        restore_cell(c);
        begin_new_version(c);
      } catch (const std::exception&) {
      }
      unpin(c);
    }
  for (auto& [c, s] : all) drop(std::move(s));
  return unseen;
}

at::CallbackHandle net = at::INVALID_CALLBACK_HANDLE;

}  // namespace

void catch_unseen_threads(Session& session, bool on) {
  if (on) session_of_net = &session;
  if (on && net == at::INVALID_CALLBACK_HANDLE) {
    net = at::addGlobalCallback(at::RecordFunctionCallback(&unseen_op_begins).scopes({at::RecordScope::FUNCTION}));
  } else if (!on && net != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(net);
    net = at::INVALID_CALLBACK_HANDLE;
  }
}

}  // namespace memmgr::pager
