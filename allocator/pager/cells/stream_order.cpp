#include "cells/stream_order.h"

#include "base/budget.h"
#include "cells/deferred_drop.h"
#include "concurrency/deferred_steps.h"
#include "guards/unseen_threads.h"
#include "remat/rematerialize.h"

namespace memmgr::pager {

static std::atomic<bool> several{false};
static std::atomic<bool> in_order{false};  // nothing of the first one is queued behind its back any more
static std::atomic<bool> profiled{false};

bool without_trap() { return several.load(std::memory_order_relaxed) || profiled.load(std::memory_order_relaxed); }

bool several_streams() { return several.load(); }

void forget_askers() { several = in_order = profiled = false; }

// What is absent is shown as the flag says from here on.
static void set_asker(std::atomic<bool>& flag, bool on) {
  std::vector<StoragePtr> held;
  {
    std::lock_guard<std::mutex> lock(graph_lock());
    flag = on;  // who leaves from here on is shown so, too
    for_each_cell_locked([&](Cell* c) {
      const uint32_t state = c->state.load();
      if (!(state & kAbsent) || (state & kBusy)) return;
      held.push_back(hold(c));
      if (held.back()) show_bytes(held.back().get(), nullptr, c);
    });
  }
  for (StoragePtr& s : held)
    if (s) drop(std::move(s));
}

void note_stream() {
  if (C10_LIKELY(in_order.load(std::memory_order_relaxed)) || budget.pool->stream() == budget.pool->opened_on()) return;
  if (tl_running_recipes > 0) return;  // for an op that has been here
  if (!several.load()) set_asker(several, true);
  finish_all_pending(true);
  settle_late_slices();
  in_order = true;
}

void note_profiler(bool on) {
  listen(kProfiler, on);
  if (profiled.load(std::memory_order_relaxed) != on) set_asker(profiled, on);
}

void note_queued_home(Cell* c) {
  const void* p = c->bytes.get();
  c->home = p && c->pool->owns(p) ? c->pool->home(p) : kNobodys;
  note_used(c);
}

void tell_last_use(const Cell* c) {
  mm_device_note_use(c->pool->queue(), c->bytes.get(), c->used_at.load(std::memory_order_relaxed));
}

Unmarked& unmarked() {
  thread_local Unmarked work;
  return work;
}

void mark_stream() {
  unmarked() = {};
  const bool limited = budget.tier && mm_arena_budget(budget.arena) < MM_UNLIMITED;  // else nothing leaves
  if (limited) mm_device_mark(budget.pool->queue(), budget.pool->stream());
}

void use_queued(Cell* c) {
  if (c->home == kNobodys) return;
  mm_device* device = c->pool->queue();
  const mm_stream now = c->pool->stream();
  // The program keeps what another stream uses alive, but not from leaving.
  if (rule_holds(kRuleUses) && c->home != now) mm_device_used(device, c->bytes.get(), now);
  // It put its streams in order behind the op that made the bytes, not behind our bringing them back elsewhere.
  const mm_stream filled = c->filled_on.load(std::memory_order_acquire);
  if (filled == kNotFilled || filled == now || c->waited_for_filling.load(std::memory_order_relaxed) == now) return;
  if (!rule_holds(kRuleFilled)) return;
  const int error = mm_device_wait(device, now, filled);
  TORCH_CHECK(error == 0, "memmgr: the stream on which a tensor was brought back cannot be waited for (a capture?)");
  c->waited_for_filling.store(now, std::memory_order_relaxed);
}

}  // namespace memmgr::pager
