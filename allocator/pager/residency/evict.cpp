#include "residency/evict.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/budget.h"
#include "base/checksum.h"
#include "base/deferred_drop.h"
#include "base/events.h"
#include "base/tensors.h"
#include "cells/births.h"
#include "cells/cell.h"
#include "cells/cell_bytes.h"
#include "cells/copies.h"
#include "cells/file_range.h"
#include "cells/freeze.h"
#include "cells/lifetime.h"
#include "cells/mapped_range.h"
#include "cells/stream_order.h"
#include "cells/version.h"
#include "concurrency/python_threads.h"
#include "pools/pool.h"
#include "pools/promised.h"
#include "pools/stream_rules.h"
#include "recipes/op_signature.h"
#include "residency/transfer.h"

namespace memmgr::pager {

static thread_local int tl_nothing_is_dropped = 0;
NothingIsDropped::NothingIsDropped() { ++tl_nothing_is_dropped; }
NothingIsDropped::~NothingIsDropped() { --tl_nothing_is_dropped; }

namespace {

// In torture mode evicted bytes are kept for a while and overwritten: the cell is restored elsewhere, and a reader of
// the old address is found.
struct Buried {
  std::mutex lock;
  std::deque<std::pair<at::DataPtr, uint64_t>> all;
  uint64_t total = 0;
};

Buried& buried() {
  static auto* b = new Buried;
  return *b;
}

void shorten(uint64_t room, size_t most) {
  std::vector<at::DataPtr> end;
  Buried& b = buried();
  std::lock_guard<std::mutex> lock(b.lock);
  while (!b.all.empty() && (b.total > room || b.all.size() > most)) {
    end.push_back(std::move(b.all.front().first));
    b.total -= b.all.front().second;
    b.all.pop_front();
  }
}

void bury(Pool* pool, at::DataPtr bytes, uint64_t nbytes) {
  pool->scribble(bytes.get(), nbytes);
  Buried& b = buried();
  {
    std::lock_guard<std::mutex> lock(b.lock);
    b.all.emplace_back(std::move(bytes), nbytes);
    b.total += nbytes;
  }
  shorten(std::min<uint64_t>(1 << 20, mm_arena_budget(budget.arena) / 32), 16);
}

// Returns true for the first eviction of a budget and every 64th after it, if a checksum costs little.
bool in_the_sample(const Pool* pool, uint64_t nbytes) {
  if (!budget.options.sample || !rule_holds(kSampled)) return false;
  return counters.departures++ % budget.options.sample == 0 && pool->sums_cheaply(nbytes);
}

// Evicts a cell that the caller has made busy. `let_go_of` drops the reference to the storage. Returns the bytes
// released.
uint64_t leave(Cell* c, Way way, void (*let_go_of)(StoragePtr)) {
  if (tl_nothing_is_dropped > 0) way = Way::kOffload;
  StoragePtr storage;
  at::DataPtr bytes;
  Trash cancelled;
  bool last = false;
  uint64_t released = 0;
  const uint64_t nbytes = c->nbytes;
  Pool* const pool = c->pool;
  const auto end_bytes = [&] {
    if (budget.options.torture && bytes.get() && bytes.get_deleter() == pool->deleter())
      bury(pool, std::move(bytes), nbytes);
    bytes.clear();
  };
  {
    std::unique_lock<std::mutex> lock(graph_lock());
    const auto give_up = [&] {
      last = end_move_locked(c, false);
      lock.unlock();
      if (last) last_user_is_gone(c);
      if (storage) let_go_of(std::move(storage));
      return uint64_t{0};
    };
    const bool orphan = !c->storage._unsafe_get_target();
    if (!orphan) {
      storage = hold(c);
      if (!storage || cell_of(storage.get()) != c) return give_up();
    }
    bool drop;
    const double cost = cost_of_leaving_locked(c, &drop);
    if (cost < 0) return give_up();
    if (way != Way::kCheaper && may_be_dropped_locked(c))
      drop = way == Way::kEvict || !(c->slot >= 0 || may_be_offloaded());
    // In torture mode every other cell is packed, so that recipes are run, too.
    static std::atomic<int> turn{0};
    const bool pack = may_be_packed_locked(c) && !(budget.options.torture && turn++ % 2);
    uint64_t packed = 0;
    mm_bits bits{};
    if (pack) {
      const void* from = c->bytes.get();
      Kind* const kind = c->version->recipe->kind;
      lock.unlock();
      packed = mm_bits_pack(from, c->nbytes, &bits);
      lock.lock();
      if (packed && !budget.options.torture && (c->state.load() & kPinMask)) {
        mm_bits_free(&bits);
        return give_up();
      }
      // The first version of its signature may have had two values by chance (zeros, say): no plan counts on packing it
      // again.
      if (packed)
        drop = false;
      else
        kind->bits_bytes = 0;
    }
    // The checksum is taken before the bytes are written: a device would otherwise wait for that copy before it goes
    // on.
    Checksum sum;
    const auto take_sum = [&] {
      const void* from = c->bytes.get();
      lock.unlock();
      sum = pool->begin_sum(from, nbytes);
      lock.lock();
    };
    if (budget.options.verify || in_the_sample(pool, nbytes)) take_sum();
    if (!packed && drop && !may_be_dropped_locked(c)) drop = false;  // its recipe ended while the lock was free
    // The cell has more than two values, unlike others of its signature.
    if (!packed && !drop && c->slot < 0 && !may_be_offloaded()) {
      if (!may_be_dropped_locked(c)) return give_up();
      drop = true;
    }
    if (!drop && !packed) await_write(c, &lock);
    if (!drop && !packed && c->slot < 0) {
      const void* from = c->bytes.get();
      lock.unlock();
      note_last_use(c);
      mm_slot slot = mm_tier_write_now(budget.tier, from, c->nbytes);
      if (slot == -ENOSPC && drop_clean_copies()) {
        note_last_use(c);
        slot = mm_tier_write_now(budget.tier, from, c->nbytes);
      }
      lock.lock();
      if (slot >= 0) {
        c->slot = slot;
        note_moved_locked(c, true);
      } else {
        note_tier_error(static_cast<int>(-slot));
        if (!may_be_dropped_locked(c)) return give_up();
        drop = true;
      }
      // Another thread pinned it while the lock was free: it stays resident, and clean.
      if (!budget.options.torture && (c->state.load() & kPinMask)) return give_up();
    } else if (!drop && !packed) {
      counters.clean_drops++;
    }
    if (drop && c->version->recipe->checked && !sum.taken()) {
      take_sum();
      if (!sum.taken() || !may_be_dropped_locked(c)) return give_up();
    }
    c->checksum = std::move(sum);
    Trash trash;
    if (packed) {
      counters.packed++;
      c->absence = Absence::kPacked;
      c->bits = bits;
    } else if (drop) {
      counters.evictions++;
      counters.evicted_bytes += c->nbytes;
      c->absence = Absence::kEvicted;
      set_evicted_locked(c->version, true, &trash);
    } else {
      c->absence = Absence::kOffloaded;
    }
    if (drop) cancel_write_locked(c, &cancelled);
    note_event_of_locked(drop ? Event::kEvict : Event::kOffload, c, c->nbytes, 0);
    const bool pages = in_mapping(c);
    if (pages) note_sample_locked(c);
    bytes = go_away_locked(c, storage.get());
    if (pages) {
      lock.unlock();
      drop_pages(*c->range);
      lock.lock();
    }
    if (packed) {  // the bits are counted once there is room for them; the cell is busy until then
      c->state.fetch_or(kAbsent);
      const Promised promised(pool->arena, packed);
      lock.unlock();
      end_bytes();
      lock.lock();
      count_bits_locked(c, packed);
    }
    released = nbytes - packed;
    last = end_move_locked(c, true);
    lock.unlock();
  }
  cancelled.end();  // a copy that is being written reads the bytes
  end_bytes();
  if (last) last_user_is_gone(c);
  if (storage) let_go_of(std::move(storage));
  return released;
}

}  // namespace

void exhume() { shorten(0, 0); }

uint64_t leave_claimed(Cell* c, Way way) { return leave(c, way, &drop_later); }

uint64_t let_go(Cell* c, Way way) {
  while (others_are_in_their_ops()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  {
    std::lock_guard<std::mutex> lock(graph_lock());
    if (!claim_locked(c)) return 0;
  }
  return leave(c, way, &drop);
}

// The last resort: frees the bits of packed cells that their ops can make again.
uint64_t give_up_bits(uint64_t want) {
  uint64_t released = 0;
  std::vector<Cell*> ended;
  {
    Trash trash;
    std::lock_guard<std::mutex> lock(graph_lock());
    if (nothing_leaves_locked()) return 0;
    for_each_cell_locked([&](Cell* c) {
      uint32_t unpinned = kAbsent;
      if (released >= want || c->absence != Absence::kPacked || !c->bits_bytes || !may_be_dropped_locked(c)) return;
      if (c->version->recipe->checked && !c->checksum.taken()) return;
      if (!c->state.compare_exchange_strong(unpinned, kAbsent | kBusy, std::memory_order_acq_rel)) return;
      released += c->bits_bytes;
      counters.evictions++;
      counters.evicted_bytes += c->nbytes;
      end_bits_locked(c);
      set_evicted_locked(c->version, true, &trash);
      c->absence = Absence::kEvicted;
      if (end_move_locked(c, true)) ended.push_back(c);
    });
  }
  for (Cell* c : ended) last_user_is_gone(c);
  return released;
}

}  // namespace memmgr::pager
