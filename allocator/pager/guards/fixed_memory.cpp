#include "guards/fixed_memory.h"

#include <c10/core/impl/COW.h>

#include <unordered_map>

#include "base/budget.h"
#include "base/mapped_areas.h"
#include "cells/cell.h"
#include "guards/touched_cells.h"
#include "pools/pool.h"

namespace memmgr::pager {

namespace {

struct Fixed {
  WeakStorage storage;
  uint64_t nbytes;
  Owner owner;
};

// Guarded by the graph's lock. A weak reference keeps the key from being another storage's.
std::unordered_map<const c10::StorageImpl*, Fixed>& all_fixed() {
  static auto* f = new std::unordered_map<const c10::StorageImpl*, Fixed>;
  return *f;
}

bool counts(Owner owner) { return owner != Owner::kMappedFile; }

Owner owner_of(const void* p, uint64_t nbytes) {
  if (!budget.pool->on_host()) return Owner::kLibrary;
  const Pages middle = look_at_pages(static_cast<const char*>(p) + nbytes / 2, 1);
  if (middle.present && middle.written) return Owner::kLibrary;  // quicker to ask than for the area
  const Area area = area_around(p);
  if (area.path.empty()) return Owner::kLibrary;
  const auto begins = [&](const char* with) { return area.path.rfind(with, 0) == 0; };
  if (begins("/dev/shm/") || begins("/memfd:") || begins("/SYSV") || begins("/torch_")) return Owner::kShared;
  return area.is_private ? Owner::kLibrary : Owner::kMappedFile;
}

bool may_be_fixed(const c10::StorageImpl* s) {
  const at::DataPtr& p = pointer_of(s);
  const Pool* pool = budget.pool;
  if (!pool || budget.forked || !p.get() || s->sym_nbytes().is_heap_allocated()) return false;
  if (p.device().type() != pool->device.type() || (!pool->on_host() && p.device().index() != pool->device.index()))
    return false;
  if (s->nbytes() < budget.options.small_bytes || pool->owns(p.get()) || c10::impl::cow::is_cow_data_ptr(p))
    return false;
  return !is_counted_as_fixed(s) && !cell_of(s) && !adoptable(s) && !is_part_of_cell(s);
}

void end_locked(const Fixed& f) {
  if (counts(f.owner)) mm_arena_add_outside(budget.arena, -static_cast<int64_t>(f.nbytes));
}

}  // namespace

static void count(c10::StorageImpl* s, uint64_t nbytes, Owner owner) {
  std::lock_guard<std::mutex> lock(graph_lock());
  if (!all_fixed().emplace(s, Fixed{WeakStorage::reclaim_copy(s), nbytes, owner}).second) return;
  if (counts(owner)) mm_arena_add_outside(budget.arena, static_cast<int64_t>(nbytes));
}

void count_fixed(c10::StorageImpl* s) {
  if (may_be_fixed(s)) count(s, s->nbytes(), owner_of(pointer_of(s).get(), s->nbytes()));
}

void count_fixed_in_budget(c10::StorageImpl* s, bool may_wait) {
  if (!may_be_fixed(s)) return;
  const uint64_t nbytes = s->nbytes();
  const Owner owner = owner_of(pointer_of(s).get(), nbytes);
  look_for_ended_fixed();
  if (counts(owner))
    with_room(nbytes, may_wait, [&] { count(s, nbytes, owner); });
  else
    count(s, nbytes, owner);
}

bool is_counted_as_fixed(const c10::StorageImpl* s) {
  std::lock_guard<std::mutex> lock(graph_lock());
  return all_fixed().count(s) > 0;
}

void look_for_ended_fixed() {
  std::vector<WeakStorage> ended;  // their memory goes without the lock
  std::lock_guard<std::mutex> lock(graph_lock());
  for (auto f = all_fixed().begin(); f != all_fixed().end();) {
    if (!f->second.storage.expired()) {
      ++f;
      continue;
    }
    end_locked(f->second);
    ended.push_back(std::move(f->second.storage));
    f = all_fixed().erase(f);
  }
}

void forget_fixed() {
  std::unordered_map<const c10::StorageImpl*, Fixed> ended;
  std::lock_guard<std::mutex> lock(graph_lock());
  for (const auto& [s, f] : all_fixed()) end_locked(f);
  ended.swap(all_fixed());
}

FixedBytes fixed_bytes() {
  look_for_ended_fixed();
  FixedBytes bytes;
  std::lock_guard<std::mutex> lock(graph_lock());
  for (const auto& [s, f] : all_fixed()) bytes.of[static_cast<size_t>(f.owner)] += f.nbytes;
  return bytes;
}

}  // namespace memmgr::pager
