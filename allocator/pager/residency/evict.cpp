#include "residency/evict.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <deque>
#include <thread>
#include <utility>
#include <vector>

#include "base/checksum.h"
#include "base/deferred_drop.h"
#include "base/events.h"
#include "base/lock.h"
#include "base/no_destructor.h"
#include "base/session.h"
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
  Lock& lock = lock_of(LockId::kBuried);
  std::deque<std::pair<at::DataPtr, uint64_t>> all GUARDED_BY(lock);
  uint64_t total GUARDED_BY(lock) = 0;
};

NoDestructor<Buried> buried;

void shorten(uint64_t room, size_t most) {
  std::vector<at::DataPtr> end;
  Buried& b = *buried;
  const Hold lock(b.lock);
  while (!b.all.empty() && (b.total > room || b.all.size() > most)) {
    end.push_back(std::move(b.all.front().first));
    b.total -= b.all.front().second;
    b.all.pop_front();
  }
}

void bury(Pool* pool, at::DataPtr bytes, uint64_t nbytes) {
  try {
    pool->scribble(bytes.get(), nbytes);
  } catch (const c10::Error&) {  // the device fails: the program's next allocation tells it
    return;
  }
  Buried& b = *buried;
  {
    const Hold lock(b.lock);
    b.all.emplace_back(std::move(bytes), nbytes);
    b.total += nbytes;
  }
  shorten(std::min<uint64_t>(1 << 20, mm_arena_budget(pool->session.arena) / 32), 16);
}

// Returns true for the first eviction of a budget and every 64th after it, if a checksum costs little.
bool in_the_sample(const Pool* pool, uint64_t nbytes) {
  Session& session = pool->session;
  if (!session.options.sample || !rule_holds(kSampled)) return false;
  return session.counters.departures++ % session.options.sample == 0 && pool->sums_cheaply(nbytes);
}

// One eviction, of a cell that the caller has made busy, in stages. Each stage that is false ends it, and the cell
// stays. No stage raises an error: the cell would stay busy, and so would the victims chosen with it. A stage gives the
// graph's lock up while it reads, writes or frees bytes, so facts found before may have changed.
class Eviction {
 public:
  // `drop_storage` drops the reference to the storage.
  Eviction(Cell* c, EvictedFor cause, Way way, void (*drop_storage)(StoragePtr))
      : c_(c),
        pool_(c->pool),
        session_(c->pool->session),
        cause_(cause),
        way_(tl_nothing_is_dropped > 0 ? Way::kOffload : way),
        drop_storage_(drop_storage) {}

  // Returns the bytes released.
  uint64_t run() {
    bool last;
    {
      const Hold lock(graph_lock());
      const bool leaves = find_storage_locked() && choose_locked() && pack_locked() && take_sum_locked() &&
                          choose_again_locked() && write_copy_locked() && take_sum_for_recipe_locked();
      if (leaves) publish_absent_locked();
      last = end_move_locked(c_, leaves);
    }
    trash_.end();
    cancelled_.end();  // a copy that is being written reads the bytes
    end_bytes();
    if (last) last_user_is_gone(c_);
    if (storage_) drop_storage_(std::move(storage_));
    return released_;
  }

 private:
  // An orphan has none.
  bool find_storage_locked() REQUIRES(graph_lock()) {
    if (!c_->storage._unsafe_get_target()) return true;
    storage_ = hold(c_);
    return storage_ && cell_of(storage_.get()) == c_;
  }

  // Drops the bytes, which a recipe makes again, or keeps a copy: as asked for, else the cheaper of both.
  bool choose_locked() REQUIRES(graph_lock()) {
    if (cost_of_eviction_locked(c_, &drop_) < 0) return false;
    if (way_ != Way::kCheaper && may_be_dropped_locked(c_))
      drop_ = way_ == Way::kEvict || !(c_->slot >= 0 || session_.may_offload());
    return true;
  }

  // Packs bytes of two values into bits.
  bool pack_locked() REQUIRES(graph_lock()) {
    // In torture mode every other cell is packed, so that recipes are run, too.
    static std::atomic<int> turn{0};
    if (!may_be_packed_locked(c_) || (session_.options.torture && turn++ % 2)) return true;
    const void* from = c_->bytes.get();
    Kind* const kind = c_->version->recipe->kind;
    {
      const Unlocked free(graph_lock());
      packed_ = mm_bits_pack(from, c_->nbytes, &bits_);
    }
    if (packed_ && is_wanted_again()) {
      mm_bits_free(&bits_);
      return false;
    }
    // The first version of its signature may have had two values by chance (zeros, say): no plan counts on packing it
    // again.
    if (packed_)
      drop_ = false;
    else
      kind->bits_bytes = 0;
    return true;
  }

  // The checksum is taken before the bytes are written: a device would otherwise wait for that copy before it goes on.
  bool take_sum_locked() REQUIRES(graph_lock()) {
    return !(session_.options.verify || in_the_sample(pool_, c_->nbytes)) || sum_up_locked();
  }

  bool choose_again_locked() REQUIRES(graph_lock()) {
    if (packed_) return true;
    if (drop_ && !may_be_dropped_locked(c_)) drop_ = false;  // its recipe ended while the lock was free
    // The cell has more than two values, unlike others of its signature.
    if (!drop_ && c_->slot < 0 && !session_.may_offload()) drop_ = true;
    return !drop_ || may_be_dropped_locked(c_);
  }

  // Writes the bytes to the tier, unless a copy is there.
  bool write_copy_locked() REQUIRES(graph_lock()) {
    if (drop_ || packed_) return true;
    await_write(c_);
    if (c_->slot >= 0) {
      session_.counters.clean_drops++;
      return true;
    }
    const void* from = c_->bytes.get();
    const auto write = [&] {
      note_last_use(c_);
      return mm_tier_write_now(session_.tier, from, c_->nbytes);
    };
    mm_slot slot;
    {
      const Unlocked free(graph_lock());
      slot = write();
      if (slot == -ENOSPC && drop_clean_copies()) slot = write();
    }
    if (slot >= 0) {
      c_->slot = slot;
      note_moved_locked(c_, true);
    } else {
      session_.note_tier_error(static_cast<int>(-slot));
      if (!may_be_dropped_locked(c_)) return false;
      drop_ = true;
    }
    return !is_wanted_again();  // then it stays resident, and clean
  }

  bool take_sum_for_recipe_locked() REQUIRES(graph_lock()) {
    if (!drop_ || !c_->version->recipe->checked || sum_.taken()) return true;
    return sum_up_locked() && sum_.taken() && may_be_dropped_locked(c_);
  }

  void publish_absent_locked() REQUIRES(graph_lock()) {
    c_->checksum = std::move(sum_);
    c_->evicted_for = cause_;
    c_->evicted_in_pass = passes_ended.load(std::memory_order_relaxed);
    if (packed_) {
      session_.counters.packed++;
      c_->absence = Absence::kPacked;
      c_->bits = bits_;
    } else if (drop_) {
      session_.counters.evictions++;
      session_.counters.evicted_bytes += c_->nbytes;
      c_->absence = Absence::kEvicted;
      set_evicted_locked(c_->version, true, &trash_);
      cancel_write_locked(c_, &cancelled_);
    } else {
      c_->absence = Absence::kOffloaded;
    }
    note_event_of_locked(drop_ ? Event::kEvict : Event::kOffload, c_, c_->nbytes, 0);
    const bool pages = in_mapping(c_);
    if (pages) note_sample_locked(c_);
    bytes_ = become_absent_locked(c_, storage_.get());
    if (pages) {
      const Unlocked free(graph_lock());
      drop_pages(*c_->range);
    }
    if (packed_) {  // the bits are counted once there is room for them; the cell is busy until then
      c_->state.fetch_or(kAbsent);
      const Promised promised(pool_->arena, packed_);
      {
        const Unlocked free(graph_lock());
        end_bytes();
      }
      count_bits_locked(c_, packed_);
    }
    released_ = c_->nbytes - packed_;
  }

  // False: the device fails, and the cell stays. The program's next allocation or copy tells it.
  bool sum_up_locked() REQUIRES(graph_lock()) {
    const void* from = c_->bytes.get();
    const Unlocked free(graph_lock());
    try {
      sum_ = pool_->begin_sum(from, c_->nbytes);
    } catch (const c10::Error&) {
      return false;
    }
    return true;
  }

  void end_bytes() {
    if (session_.options.torture && bytes_.get() && bytes_.get_deleter() == pool_->deleter())
      bury(pool_, std::move(bytes_), nbytes_);
    bytes_.clear();
  }

  // Another thread pinned the cell while the lock was free.
  bool is_wanted_again() const { return !session_.options.torture && (c_->state.load() & kPinMask); }

  Cell* const c_;
  Pool* const pool_;
  Session& session_;
  const EvictedFor cause_;
  const uint64_t nbytes_ = c_->nbytes;
  const Way way_;
  void (*const drop_storage_)(StoragePtr);
  StoragePtr storage_;
  at::DataPtr bytes_;
  Trash trash_, cancelled_;
  Checksum sum_;
  mm_bits bits_{};
  uint64_t packed_ = 0;  // bytes of the bits; 0: not packed
  bool drop_ = false;
  uint64_t released_ = 0;
};

}  // namespace

void exhume() { shorten(0, 0); }

uint64_t evict_claimed(Cell* c, EvictedFor cause, Way way) { return Eviction(c, cause, way, &drop_later).run(); }

uint64_t evict(Cell* c, EvictedFor cause, Way way) {
  while (others_are_in_their_ops()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  {
    const Hold lock(graph_lock());
    if (!claim_locked(c)) return 0;
  }
  return Eviction(c, cause, way, &drop).run();
}

// The last resort: frees the bits of packed cells that their ops can make again.
uint64_t give_up_bits(uint64_t want) {
  uint64_t released = 0;
  std::vector<Cell*> ended;
  {
    Trash trash;
    const Hold lock(graph_lock());
    if (is_frozen_locked()) return 0;
    for_each_cell_locked([&](Cell* c) REQUIRES(graph_lock()) {
      uint32_t unpinned = kAbsent;
      if (released >= want || c->absence != Absence::kPacked || !c->bits_bytes || !may_be_dropped_locked(c)) return;
      if (c->version->recipe->checked && !c->checksum.taken()) return;
      if (!c->state.compare_exchange_strong(unpinned, kAbsent | kBusy, std::memory_order_acq_rel)) return;
      released += c->bits_bytes;
      Counters& counters = c->pool->session.counters;
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
