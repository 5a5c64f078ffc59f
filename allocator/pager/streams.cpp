#include "streams.h"

namespace memmgr::pager {

void use_queued(Cell* c) {
  mm_device* device = c->pool->queue();
  const void* p = c->bytes.get();
  if (!device || !p || !mm_arena_owns(c->pool->arena, p)) return;
  const mm_stream now = c->pool->stream();
  // The program keeps what another stream uses alive, but not from leaving.
  if (rule_holds(kRuleUses) && mm_device_home(device, p) != now) mm_device_used(device, const_cast<void*>(p), now);
  // It put its streams in order behind the op that made the bytes, not behind our bringing them back elsewhere.
  const mm_stream filled = c->filled_on.load(std::memory_order_acquire);
  if (filled == kNotFilled || filled == now || c->waited_for_filling.load(std::memory_order_relaxed) == now) return;
  if (!rule_holds(kRuleFilled)) return;
  const int error = mm_device_wait(device, now, filled);
  TORCH_CHECK(error == 0, "memmgr: the stream on which a tensor was brought back cannot be waited for (a capture?)");
  c->waited_for_filling.store(now, std::memory_order_relaxed);
}

}  // namespace memmgr::pager
