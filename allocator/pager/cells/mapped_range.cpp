#include "cells/mapped_range.h"

#include <ATen/MapAllocator.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "base/lock.h"
#include "base/mapped_areas.h"
#include "base/no_destructor.h"
#include "base/private_member.h"
#include "base/tensors.h"
#include "cells/cell.h"
#include "cells/freeze.h"
#include "pools/pool.h"

namespace memmgr::pager {

MEMMGR_PRIVATE_MEMBER(FlagsOfMapAllocator, at::MapAllocator, flags_)

Mapping::~Mapping() {
  if (fd >= 0) close(fd);
}

namespace {

std::atomic<int> ranges{0};

NoDestructor<std::vector<std::weak_ptr<Mapping>>> mappings OF_GRAPH;

bool is_private_mapping(const at::DataPtr& p) {
  const at::MapAllocator* map = at::MapAllocator::fromDataPtr(p);
  return map && !(map->*private_member(FlagsOfMapAllocator()) &
                  (at::ALLOCATOR_MAPPED_SHARED | at::ALLOCATOR_MAPPED_SHAREDMEM));
}

// Opens the file of the area; -1 if that fails. The path may name another file by now, and device numbers of maps and
// of fstat differ on some file systems. So a page of the opened file is mapped, and the kernel's two names are
// compared.
int open_file_of(const Area& area) {
  const int fd = open(area.path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return -1;
  void* page = mmap(nullptr, kPage, PROT_READ, MAP_PRIVATE, fd, 0);
  bool same = false;
  if (page != MAP_FAILED) {
    same = std::strcmp(area_around(page).file, area.file) == 0;
    munmap(page, kPage);
  }
  if (same) return fd;
  close(fd);
  return -1;
}

std::shared_ptr<Mapping> mapping_around_locked(const void* address, uint64_t nbytes) REQUIRES(graph_lock()) {
  auto& known = *mappings;
  known.erase(std::remove_if(known.begin(), known.end(), [](const auto& m) { return m.expired(); }), known.end());
  const auto begin = reinterpret_cast<uintptr_t>(address);
  for (const std::weak_ptr<Mapping>& weak : known)
    if (auto m = weak.lock(); m && m->begin <= begin && begin + nbytes <= m->end) return m;
  const Area area = area_around(address);
  auto made = std::make_shared<Mapping>();
  made->begin = area.end ? area.begin : begin;
  made->end = std::max<uintptr_t>(area.end, begin + nbytes);
  made->offset = area.offset;
  made->path = area.path;
  if (area.is_private && !area.path.empty() && begin + nbytes <= area.end) made->fd = open_file_of(area);
  known.push_back(made);
  return made;
}

bool overlap(const char* a, uint64_t a_bytes, const char* b, uint64_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

}  // namespace

std::vector<std::shared_ptr<Mapping>> living_mappings_locked() {
  std::vector<std::shared_ptr<Mapping>> living;
  for (const std::weak_ptr<Mapping>& weak : *mappings)
    if (auto m = weak.lock()) living.push_back(std::move(m));
  return living;
}

bool any_ranges() { return ranges.load(std::memory_order_relaxed) > 0; }

void each_over_locked(const c10::StorageImpl* s, c10::function_ref<void(Cell*)> visit) {
  const auto* begin = static_cast<const char*>(pointer_of(s).get());
  const Cell* own = cell_of(s);
  if (own && own->range) begin = own->range->begin;
  if (!begin) return;
  for (const auto& m : living_mappings_locked())
    for (Cell* c : m->cells)
      if (c != own && overlap(c->range->begin, c->range->nbytes, begin, s->nbytes())) visit(c);
}

bool stays_in_mapping(const Cell* c) { return c->escape != Escape::kNone && in_mapping(c); }

uint64_t sample_of(const void* data, uint64_t nbytes) {
  constexpr uint64_t kWords = 64;
  const uint64_t words = nbytes / sizeof(uint64_t), step = std::max<uint64_t>(words / kWords, 1);
  uint64_t sum = nbytes;
  for (uint64_t i = 0; i < words; i += step) {
    uint64_t word;
    std::memcpy(&word, static_cast<const char*>(data) + i * sizeof word, sizeof word);
    sum = (sum ^ word) * 0x9E3779B97F4A7C15u;
    sum ^= sum >> 29;
  }
  return sum;
}

bool is_mapped(const c10::StorageImpl* s) {
  const at::DataPtr* p = &pointer_of(s);
  for (int depth = 0; end_of_slice && p->get_deleter() == end_of_slice && depth < 4; ++depth) {
    const auto* whole = static_cast<const c10::StorageImpl*>(p->get_context());
    if (const Cell* c = cell_of(whole))
      return c->range && overlap(static_cast<const char*>(pointer_of(s).get()), 1, c->range->begin, c->range->nbytes);
    p = &pointer_of(whole);
  }
  return is_private_mapping(*p);
}

bool is_part_of_cell(const c10::StorageImpl* s) {
  const at::DataPtr& p = pointer_of(s);
  return end_of_slice && p.get_deleter() == end_of_slice &&
         cell_of(static_cast<const c10::StorageImpl*>(p.get_context()));
}

bool may_begin_range_locked(const c10::StorageImpl* s) {
  bool may = true;
  each_over_locked(s, [&](const Cell* c) { may &= stays_in_mapping(c); });
  return may;
}

void begin_range_locked(Cell* c) {
  auto range = std::make_unique<MappedRange>();
  range->begin = static_cast<char*>(c->bytes.get());
  range->nbytes = c->nbytes;
  range->mapping = mapping_around_locked(range->begin, range->nbytes);
  range->mapping->cells.push_back(c);
  ranges++;
  c->lead = static_cast<uint8_t>(reinterpret_cast<uintptr_t>(range->begin) % kLine);
  c->range = range.release();
  const Mapping& m = *c->range->mapping;
  mm_tier* tier = c->pool->session.tier;
  if (c->small || m.fd < 0 || !tier || look_at_pages(c->range->begin, c->nbytes).written) return;
  const uint64_t offset = m.offset + (reinterpret_cast<uintptr_t>(c->range->begin) - m.begin);
  const mm_slot slot = mm_tier_lend(tier, m.fd, offset, c->nbytes);
  if (slot >= 0) c->slot = c->range->lent = slot;
}

bool begins_away_locked(const Cell* c) {
  return has_file_copy(c) && !is_frozen_locked() && !look_at_pages(c->range->begin, c->nbytes).present;
}

std::unique_ptr<MappedRange> end_range_locked(Cell* c) {
  std::unique_ptr<MappedRange> range(std::exchange(c->range, nullptr));
  if (range) {
    auto& cells = range->mapping->cells;
    cells.erase(std::remove(cells.begin(), cells.end(), c), cells.end());
    ranges--;
  }
  return range;
}

void note_sample_locked(Cell* c) {
  if (!has_file_copy(c) || c->range->sampled) return;
  c->range->sample = sample_of(c->bytes.get(), c->nbytes);
  c->range->sampled = true;
}

bool sample_agrees(const Cell* c, const void* data) {
  return !has_file_copy(c) || !c->range->sampled || sample_of(data, c->nbytes) == c->range->sample;
}

void throw_file_failed(const Cell* c, int error) {
  const std::string& path = c->range->mapping->path;
  TORCH_CHECK(error != ESTALE, "memmgr: ", path,
              " has changed since the tensors that are mapped from it were read: ", c->nbytes,
              " bytes of one cannot be read again. Keep the file as it is while they are in use, write the new one "
              "beside it and rename it, or load without mmap.");
  TORCH_CHECK(false, "memmgr: reading ", c->nbytes, " bytes of ", path, " again failed: ", std::strerror(error));
}

uint64_t mapped_bytes() {
  uint64_t bytes = 0;
  const Hold lock(graph_lock());
  for (const auto& m : living_mappings_locked())
    for (const Cell* c : m->cells)
      if (has_file_copy(c)) bytes += c->nbytes;
  return bytes;
}

}  // namespace memmgr::pager
