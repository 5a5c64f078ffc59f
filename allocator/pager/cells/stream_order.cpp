#include "cells/stream_order.h"

#include "cells/cell.h"

namespace memmgr::pager {

std::atomic<bool> several_streams{false};

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

void mark_stream(const Session& session) {
  unmarked() = {};
  const bool limited = session.tier && mm_arena_budget(session.arena) < MM_UNLIMITED;  // otherwise no cell is evicted
  if (limited) mm_device_mark(session.pool->queue(), session.pool->stream());
}

void use_queued(Cell* c) {
  if (c->home == kNobodys) return;
  mm_device* device = c->pool->queue();
  const mm_stream now = c->pool->stream();
  // The program keeps memory alive that another stream uses, but does not keep it from eviction.
  if (rule_holds(kRuleUses) && c->home != now) mm_device_used(device, c->bytes.get(), now);
  // The program ordered its streams after the op that made the bytes, not after the pager's restore.
  const mm_stream filled = c->filled_on.load(std::memory_order_acquire);
  if (filled == kNotFilled || filled == now || c->waited_for_filling.load(std::memory_order_relaxed) == now) return;
  if (!rule_holds(kRuleFilled)) return;
  const int error = mm_device_wait(device, now, filled);
  TORCH_CHECK(error == 0, "memmgr: the stream on which a tensor was brought back cannot be waited for (a capture?)");
  c->waited_for_filling.store(now, std::memory_order_relaxed);
}

}  // namespace memmgr::pager
