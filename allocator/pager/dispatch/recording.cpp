#include "dispatch/recording.h"

#include <pybind11/pybind11.h>

#include <algorithm>

#include "base/lock.h"
#include "base/refusal.h"
#include "cells/cell.h"
#include "dispatch/the_session.h"
#include "pools/pool.h"
#include "pools/stream_rules.h"
#include "remat/determinism_check.h"
#include "residency/floor.h"

namespace memmgr::pager {

bool is_measuring_run() { return mm_arena_budget(the_session.arena) >= MM_UNLIMITED && !the_session.options.torture; }

bool has_room_for_check(uint64_t bytes) {
  return mm_arena_resident(the_session.arena) + bytes <=
         (is_measuring_run() ? most_resident.load(std::memory_order_relaxed) : mm_arena_budget(the_session.arena));
}

bool interrupts(const std::exception& e) {
  const auto* error = dynamic_cast<const pybind11::error_already_set*>(&e);
  if (!error) return false;
  const pybind11::gil_scoped_acquire gil;
  return !error->matches(PyExc_Exception);
}

bool Recording::may_check(uint64_t bytes) const {
  constexpr uint32_t kMostInVain = 8;  // determinism checks for which cells had to be evicted
  return has_room_for_check(bytes) ||
         (!is_measuring_run() && recipe_->kind->checks_without_room.load(std::memory_order_relaxed) < kMostInVain);
}

void Recording::copy_written() {
  for (const TensorArg& a : recipe_->tensors) {
    if (a.role != ArgumentRole::kWritten) continue;
    Cell* c;
    {
      const Hold lock(graph_lock());
      c = a.version->cell;
    }
    if (!c) continue;
    if (!may_check(c->nbytes)) return;
    try {
      const OwnWork own;
      before_.push_back(
          c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(c->nbytes),
                                                c->pool->allocate(c->nbytes), c->pool->allocator(), false));
    } catch (const c10::OutOfMemoryError&) {
      return;  // no room for a check: another time
    }
    c->pool->copy(pointer_of(before_.back().get()).get(), c->bytes.get(), c->nbytes);
  }
}

bool Recording::has_copies() const {
  size_t written = 0;
  for (const TensorArg& a : recipe_->tensors) written += a.role == ArgumentRole::kWritten;
  return before_.size() == written;
}

void Recording::note_run(double seconds) {
  Recipe& r = *recipe_;
  if (C10_UNLIKELY(r.kind->trust.load(std::memory_order_relaxed) == Trust::kFamily))
    r.seconds = queues ? seconds_by_family(r) : seconds;
  else if (C10_LIKELY(!queues))
    note_seconds(r.kind, seconds);
}

void Recording::end_check(bool same, c10::ArrayRef<c10::StorageImpl*> made) {
  Kind* kind = recipe_->kind;
  if (same && made.size() == 1 && made[0] && the_session.pool->on_host()) {
    mm_bits bits{};
    kind->bits_bytes = mm_bits_pack(pointer_of(made[0]).get(), made[0]->nbytes(), &bits);
    if (kind->bits_bytes) mm_bits_free(&bits);
  }
  end_trial(the_session, kind, same);
}

void Recording::check(c10::ArrayRef<c10::StorageImpl*> made, uint64_t bytes) {
  Kind* kind = recipe_->kind;
  if (!is_new() || !has_copies() || !may_check(bytes)) return;
  try {
    const Again again = run_again(the_session, *recipe_, made, std::move(before_));
    if (again == Again::kSameWhereWritten) kind->clears.store(true);
    end_check(again != Again::kOther, made);
  } catch (const c10::OutOfMemoryError&) {
    kind->checks_without_room++;  // no room for a second result: another time
    kind->needs_bytes = refused_bytes() + bytes;
  } catch (const std::exception& e) {
    if (interrupts(e)) throw;
    end_trial(the_session, kind, false);
  }
  before_.clear();
}

void Recording::attach_if_trusted(c10::ArrayRef<Version*> versions) {
  if (!recipe_->kind->trusted()) {
    if (is_measuring_run() && is_new()) {
      const Hold lock(graph_lock());
      for (Version* v : versions) {
        if (!v || v->recipe) continue;
        v->presumed = true;
        if (v->cell && v->cell->version == v) count_root_locked(v->cell);
      }
    }
    give_up();
    return;
  }
  {
    Trash trash;
    const Hold lock(graph_lock());
    attach_locked(std::move(recipe_), versions, &trash);
  }
  keep_recipes_few(the_session);
}

}  // namespace memmgr::pager
