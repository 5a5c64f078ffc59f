#include "guards/mapped_files.h"

#include <ATen/MapAllocator.h>
#include <Python.h>
#include <c10/util/ScopeExit.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
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
#include "base/session.h"
#include "base/tensors.h"
#include "cells/adoption.h"
#include "cells/cell.h"
#include "cells/file_range.h"
#include "cells/lifetime.h"
#include "cells/mapped_range.h"
#include "cells/pointer_trap.h"
#include "cells/stream_order.h"
#include "cells/types.h"
#include "guards/escape.h"
#include "pools/pool.h"
#include "residency/checksums.h"
#include "residency/restore.h"

namespace memmgr::pager {

namespace {

// Makes an absent cell busy whose bytes are in the tier. `in_file`: only if the file is its copy.
bool begin_move_below(Cell* c, bool in_file) {
  uint32_t absent = kAbsent;
  const Hold lock(graph_lock());
  const bool below = in_file ? has_file_copy(c) : c->slot >= 0;
  return below && c->absence == Absence::kOffloaded && c->state.compare_exchange_strong(absent, kAbsent | kBusy);
}

// Gives a resident cell other memory for its bytes. Returns the memory that they were in.
at::DataPtr put_locked(Cell* c, at::DataPtr bytes) REQUIRES(graph_lock()) {
  at::DataPtr before = std::move(c->bytes);
  c->bytes = std::move(bytes);
  if (auto* s = c->storage._unsafe_get_target()) show_bytes(s, c->bytes.get(), c);
  note_home(c);
  return before;
}

// Returns true if the file still has the bytes of the cell. The caller has the cell busy, and the file is its copy.
bool file_agrees(Cell* c) {
  const MappedRange& range = *c->range;
  if (mm_tier_check_lent(c->pool->session.tier, c->slot) < 0) return false;
  if (in_mapping(c)) return true;
  const bool agrees = c->state.load() & kAbsent
                          ? sum_agrees(c, range.begin)
                          : sample_of(range.begin, range.nbytes) == sample_of(c->bytes.get(), c->nbytes);
  drop_pages(range);
  return agrees;
}

// Makes the cell busy, resident or with its file as the only copy. Returns null, or the reason why that is impossible.
const char* claim(Cell* c) {
  using Clock = std::chrono::steady_clock;
  for (const auto until = Clock::now() + std::chrono::seconds(10); Clock::now() < until;) {
    if (c->escape != Escape::kNone) return "its address has been handed out";
    if (begin_move(c) || begin_move_below(c, true)) return nullptr;
    if (c->state.load() & kAbsent) fetch(c);
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return "an op or a pin that does not end uses it";
}

// Puts the bytes at the range's own address. The caller has the cell busy, resident or absent. Ends the move.
void move_to_mapping(Cell* c) {
  MappedRange& range = *c->range;
  at::DataPtr before;
  const bool absent = c->state.load() & kAbsent;
  bool last;
  try {
    if (has_file_copy(c)) {
      if (!file_agrees(c)) throw_file_failed(c, ESTALE);
    } else if (absent) {
      const int error = mm_tier_read_now(c->pool->session.tier, c->slot, range.begin);
      TORCH_CHECK(error >= 0, "memmgr: the disk tier failed: reading ", c->nbytes,
                  " bytes back: ", std::strerror(-error));
      check_sum(c, range.begin);
    } else if (!in_mapping(c)) {
      std::memcpy(range.begin, c->bytes.get(), c->nbytes);
    }
  } catch (...) {
    end_move(c, absent);
    throw;
  }
  {
    Trash trash;
    const Hold lock(graph_lock());
    if (in_mapping(c)) {
      last = end_move_locked(c, false);
    } else {
      c->outside = true;
      mm_arena_add_outside(c->pool->arena, static_cast<int64_t>(c->nbytes));
      if (absent) {
        last = become_resident_locked(c, std::move(range.home), kNotFilled, &trash);
      } else {
        before = put_locked(c, std::move(range.home));
        last = end_move_locked(c, false);
      }
      range.home.clear();
    }
  }
  if (last) last_user_is_gone(c);
}

}  // namespace

bool share_mapping(c10::StorageImpl* s) {
  if (C10_LIKELY(!any_ranges()) || !is_mapped(s)) return false;
  std::vector<std::pair<Cell*, WeakStorage>> found;
  bool any = false;
  {
    const Hold lock(graph_lock());
    each_over_locked(s, [&](Cell* c) REQUIRES(graph_lock()) {
      any = true;
      if (!stays_in_mapping(c)) found.emplace_back(c, c->storage);
    });
  }
  for (auto& [c, weak] : found) {
    StoragePtr held = weak.lock();
    if (!held || cell_of(held.get()) != c) continue;
    const char* why = claim(c);
    TORCH_CHECK(!why, "memmgr: a tensor has the same bytes of the mapped file ", c->range->mapping->path,
                " as another one that cannot be moved: ", why);
    {
      pin(c, ticks());  // busy until the move ends; the pin then keeps it in place
      const auto unpinned = c10::make_scope_exit([c = c] { unpin(c); });
      move_to_mapping(c);
      escape(c, Escape::kSlice);
    }
    drop(std::move(held));
  }
  return any;
}

static Cell* adopt_shared(Session& session, c10::StorageImpl* s, uint32_t pins) {
  bool shared = share_mapping(s);
  for (Cell* c; adoptable(session, s);
       shared |= share_mapping(s)) {  // another cell may have been made over these bytes
    {
      const Hold lock(graph_lock());
      c = adopt_locked(session, s, pins + shared, ticks());
    }
    if (!c) continue;
    if (shared) {  // pinned, so it is in the mapping until the escape
      const auto unpinned = c10::make_scope_exit([c] { unpin(c); });
      escape(c, Escape::kSlice);
    }
    return c;
  }
  return nullptr;
}
static const bool adopts_mapped = (adopt_mapped = &adopt_shared, true);

bool return_to_mapping(Cell* c) {
  if (!c->range || c->small || c->range->overwritten || c->escape != Escape::kNone || in_mapping(c)) return false;
  if (!begin_move(c) && !begin_move_below(c, false)) return false;
  const bool absent = c->state.load() & kAbsent;
  if (!absent && has_file_copy(c) && !file_agrees(c)) {
    c->range->overwritten = true;  // the pool has the bytes that the file had
    end_move(c, false);
    return false;
  }
  move_to_mapping(c);
  return true;
}

// Returns the cells over the file, with references to their storages.
static std::vector<std::pair<Cell*, WeakStorage>> cells_of_file(const char* path) {
  std::vector<std::pair<Cell*, WeakStorage>> found;
  struct stat wanted{}, one{};
  if (stat(path, &wanted) != 0) return found;
  const Hold lock(graph_lock());
  for (const auto& m : living_mappings_locked()) {
    if (m->fd < 0 || fstat(m->fd, &one) != 0 || one.st_dev != wanted.st_dev || one.st_ino != wanted.st_ino) continue;
    for (Cell* c : m->cells)
      if (!c->small) found.emplace_back(c, c->storage);
  }
  return found;
}

// The file is no longer a copy of the cell's bytes, and they never move back to the mapping.
static void forget_file_locked(Cell* c, Trash* trash) REQUIRES(graph_lock()) {
  c->range->overwritten = true;
  if (c->slot >= 0) trash->add_slot(c, std::exchange(c->slot, -1));
  count_root_locked(c);
}

// Forgets the file under a pin, so that the cell does not move. False: the cell is absent or in the mapping.
static bool forget_file_in_pool(Cell* c) {
  const bool there = pin(c, ticks());
  const auto unpinned = c10::make_scope_exit([c] { unpin(c); });
  if (!there || in_mapping(c)) return false;
  Trash trash;
  const Hold lock(graph_lock());
  forget_file_locked(c, &trash);
  return true;
}

static void move_to_pool(Cell* c) {
  const char* why = claim(c);
  TORCH_CHECK(!why, "memmgr: ", c->range->mapping->path,
              " cannot be overwritten: a tensor that is mapped from it cannot be moved: ", why);
  const bool absent = c->state.load() & kAbsent;
  at::DataPtr block;
  try {
    if (absent || in_mapping(c)) block = allocate_for(c);
    if (absent) {
      if (const int error = mm_tier_read_now(c->pool->session.tier, c->slot, block.get()); error < 0)
        throw_file_failed(c, -error);
      check_sum(c, block.get());
    } else if (block) {
      std::memcpy(block.get(), c->bytes.get(), c->nbytes);
    }
  } catch (...) {
    end_move(c, absent);
    throw;
  }
  bool last;
  {
    Trash trash;
    const Hold lock(graph_lock());
    forget_file_locked(c, &trash);
    if (absent) {
      last = become_resident_locked(c, std::move(block), kNotFilled, &trash);
    } else {
      if (block) {
        mm_arena_add_outside(c->pool->arena, -static_cast<int64_t>(c->nbytes));
        c->outside = false;
        c->range->home = put_locked(c, std::move(block));
      }
      last = end_move_locked(c, false);
    }
  }
  if (last) last_user_is_gone(c);
}

void forsake_file(const char* path) {
  for (auto& [c, weak] : cells_of_file(path)) {
    StoragePtr held = weak.lock();
    if (!held || cell_of(held.get()) != c) continue;
    // The address of an escaped cell was handed out: the cell stays over the file, as in plain torch.
    if (c->escape == Escape::kNone && !forget_file_in_pool(c)) move_to_pool(c);
    drop(std::move(held));
  }
}

}  // namespace memmgr::pager
