#include "cells/fixed_memory.h"

#include <c10/core/impl/COW.h>

#include <unordered_map>

#include "base/forked_child.h"
#include "base/lock.h"
#include "base/mapped_areas.h"
#include "base/no_destructor.h"
#include "base/tensors.h"
#include "cells/adoption.h"
#include "cells/cell.h"
#include "cells/mapped_range.h"
#include "pools/pool.h"

namespace memmgr::pager {

namespace {

struct Fixed {
  WeakStorage storage;
  uint64_t nbytes;
  Owner owner;
  mm_arena* arena;  // in which the bytes count
};

// The weak reference keeps the key from being reused for another storage.
NoDestructor<std::unordered_map<const c10::StorageImpl*, Fixed>> all_fixed OF_GRAPH;

Owner owner_of(const Pool& pool, const void* p, uint64_t nbytes) {
  if (!pool.on_host()) return Owner::kLibrary;
  const Pages middle = look_at_pages(static_cast<const char*>(p) + nbytes / 2, 1);
  if (middle.present && middle.written) return Owner::kLibrary;  // quicker than the look-up of the area
  const Area area = area_around(p);
  if (area.path.empty()) return Owner::kLibrary;
  const auto begins = [&](const char* with) { return area.path.rfind(with, 0) == 0; };
  if (begins("/dev/shm/") || begins("/memfd:") || begins("/SYSV") || begins("/torch_")) return Owner::kShared;
  return area.is_private ? Owner::kLibrary : Owner::kMappedFile;
}

bool may_be_fixed(const Session& session, const c10::StorageImpl* s) {
  const at::DataPtr& p = pointer_of(s);
  const Pool* pool = session.pool;
  if (!pool || forked_child || !p.get() || s->sym_nbytes().is_heap_allocated()) return false;
  if (p.device().type() != pool->device.type() || (!pool->on_host() && p.device().index() != pool->device.index()))
    return false;
  if (s->nbytes() < session.options.small_bytes || pool->counts(p) || c10::impl::cow::is_cow_data_ptr(p)) return false;
  return !is_counted_as_fixed(s) && !cell_of(s) && !adoptable(session, s) && !is_part_of_cell(s);
}

void end_locked(const Fixed& f) REQUIRES(graph_lock()) {
  if (takes_room(f.owner)) mm_arena_add_outside(f.arena, -static_cast<int64_t>(f.nbytes));
}

}  // namespace

bool takes_room(Owner owner) { return owner != Owner::kMappedFile; }

void count_fixed(const Session& session, c10::StorageImpl* s, Owner owner) {
  const Hold lock(graph_lock());
  if (!all_fixed->emplace(s, Fixed{WeakStorage::reclaim_copy(s), s->nbytes(), owner, session.arena}).second) return;
  if (takes_room(owner)) mm_arena_add_outside(session.arena, static_cast<int64_t>(s->nbytes()));
}

std::optional<Owner> owner_of_fixed(const Session& session, const c10::StorageImpl* s) {
  if (!may_be_fixed(session, s)) return std::nullopt;
  return owner_of(*session.pool, pointer_of(s).get(), s->nbytes());
}

void count_fixed(const Session& session, c10::StorageImpl* s) {
  if (const auto owner = owner_of_fixed(session, s)) count_fixed(session, s, *owner);
}

bool is_counted_as_fixed(const c10::StorageImpl* s) {
  const Hold lock(graph_lock());
  return all_fixed->count(s) > 0;
}

void look_for_ended_fixed() {
  std::vector<WeakStorage> ended;  // their memory is freed without the lock
  const Hold lock(graph_lock());
  for (auto f = all_fixed->begin(); f != all_fixed->end();) {
    if (!f->second.storage.expired()) {
      ++f;
      continue;
    }
    end_locked(f->second);
    ended.push_back(std::move(f->second.storage));
    f = all_fixed->erase(f);
  }
}

void forget_fixed() {
  std::unordered_map<const c10::StorageImpl*, Fixed> ended;
  const Hold lock(graph_lock());
  for (const auto& [s, f] : *all_fixed) end_locked(f);
  ended.swap(*all_fixed);
}

FixedBytes fixed_bytes() {
  look_for_ended_fixed();
  FixedBytes bytes;
  const Hold lock(graph_lock());
  for (const auto& [s, f] : *all_fixed) bytes.of[static_cast<size_t>(f.owner)] += f.nbytes;
  return bytes;
}

}  // namespace memmgr::pager
