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

#include "base/budget.h"
#include "base/mapped_areas.h"
#include "base/private_member.h"
#include "cells/cell.h"
#include "cells/deferred_drop.h"
#include "guards/escape.h"
#include "pools/pool.h"
#include "residency/reclaim.h"
#include "residency/victims.h"

namespace memmgr::pager {

MEMMGR_PRIVATE_MEMBER(FlagsOfMapAllocator, at::MapAllocator, flags_)

// One mmap of a file. Its cells are guarded by the graph's lock.
struct Mapping {
  uintptr_t begin = 0, end = 0;
  uint64_t offset = 0;  // in the file, of `begin`
  std::string path;
  int fd = -1;  // none: the file cannot be found any more
  std::vector<Cell*> cells;

  ~Mapping() {
    if (fd >= 0) close(fd);
  }
};

namespace {

// The deleter of a slice of a storage. Its context is the whole storage.
c10::DeleterFnPtr end_of_slice = nullptr;

std::atomic<int> ranges{0};

std::vector<std::weak_ptr<Mapping>>& mappings() {
  static auto* m = new std::vector<std::weak_ptr<Mapping>>;
  return *m;
}

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

std::shared_ptr<Mapping> mapping_around_locked(const void* address, uint64_t nbytes) {
  auto& known = mappings();
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

// Cells of other storages over bytes of `s`.
template <class F>
void each_over_locked(const c10::StorageImpl* s, F&& visit) {
  const auto* begin = static_cast<const char*>(pointer_of(s).get());
  const Cell* own = cell_of(s);
  if (own && own->range) begin = own->range->begin;
  if (!begin) return;
  for (const std::weak_ptr<Mapping>& weak : mappings())
    if (const auto m = weak.lock())
      for (Cell* c : m->cells)
        if (c != own && overlap(c->range->begin, c->range->nbytes, begin, s->nbytes())) visit(c);
}

// Makes an absent cell busy whose bytes are below; `in_file`: only one whose file is its copy.
bool begin_move_below(Cell* c, bool in_file) {
  uint32_t absent = kAbsent;
  std::lock_guard<std::mutex> lock(graph_lock());
  const bool below = in_file ? has_file_copy(c) : c->slot >= 0;
  return below && c->absence == Absence::kOffloaded && c->state.compare_exchange_strong(absent, kAbsent | kBusy);
}

// The bytes of a resident cell are in other memory from here on. Returns the memory that they were in.
at::DataPtr put_locked(Cell* c, at::DataPtr bytes) {
  at::DataPtr before = std::move(c->bytes);
  c->bytes = std::move(bytes);
  if (auto* s = c->storage._unsafe_get_target()) show_bytes(s, c->bytes.get(), c);
  note_home(c);
  return before;
}

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

// True if the file still has the bytes of the cell. The caller has the cell busy, and the file is its copy.
bool file_agrees(Cell* c) {
  const MappedRange& range = *c->range;
  if (mm_tier_check_lent(budget.tier, c->slot) < 0) return false;
  if (in_mapping(c)) return true;
  const bool agrees = c->state.load() & kAbsent
                          ? sum_agrees(c, range.begin)
                          : sample_of(range.begin, range.nbytes) == sample_of(c->bytes.get(), c->nbytes);
  drop_pages(range);
  return agrees;
}

bool stays_in_mapping(const Cell* c) { return c->escape != Escape::kNone && in_mapping(c); }

// Makes the cell busy, resident or with its file as the only copy. Null, or the reason why that cannot be.
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

// Puts the bytes at the range's own address. The caller has the cell busy, resident or below; ends the move.
void move_to_mapping(Cell* c) {
  MappedRange& range = *c->range;
  at::DataPtr before;
  const bool absent = c->state.load() & kAbsent;
  bool last;
  try {
    if (has_file_copy(c)) {
      if (!file_agrees(c)) throw_file_failed(c, ESTALE);
    } else if (absent) {
      const int error = mm_tier_read_now(budget.tier, c->slot, range.begin);
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
    std::lock_guard<std::mutex> lock(graph_lock());
    if (in_mapping(c)) {
      last = end_move_locked(c, false);
    } else {
      c->outside = true;
      mm_arena_add_outside(c->pool->arena, static_cast<int64_t>(c->nbytes));
      if (absent) {
        last = come_back_locked(c, std::move(range.home), kNotFilled, &trash);
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

MappedRange::~MappedRange() {
  if (clean) drop_pages(*this);
  if (!home.get() || home.get_deleter() != end_of_slice) return;
  // Python may have the whole storage, too: a thread without a lock gives the reference back.
  drop_later(StoragePtr::reclaim(static_cast<c10::StorageImpl*>(home.release_context())));
}

void learn_mapped() {
  if (end_of_slice) return;
  PyObject* torch = PyImport_ImportModule("torch");
  PyObject* whole = torch ? PyObject_CallMethod(torch, "UntypedStorage", "i", 2) : nullptr;
  PyObject* part = whole ? PySequence_GetSlice(whole, 0, 1) : nullptr;
  PyObject* address = part ? PyObject_GetAttrString(part, "_cdata") : nullptr;
  if (address) end_of_slice = pointer_of(static_cast<c10::StorageImpl*>(PyLong_AsVoidPtr(address))).get_deleter();
  for (PyObject* o : {address, part, whole, torch}) Py_XDECREF(o);
  PyErr_Clear();
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
  if (c->small || m.fd < 0 || !budget.tier || look_at_pages(c->range->begin, c->nbytes).written) return;
  const uint64_t offset = m.offset + (reinterpret_cast<uintptr_t>(c->range->begin) - m.begin);
  const mm_slot slot = mm_tier_lend(budget.tier, m.fd, offset, c->nbytes);
  if (slot >= 0) c->slot = c->range->lent = slot;
}

bool begins_away_locked(const Cell* c) {
  return has_file_copy(c) && !nothing_leaves_locked() && !look_at_pages(c->range->begin, c->nbytes).present;
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

void drop_pages(const MappedRange& range) {
  const auto begin = reinterpret_cast<uintptr_t>(range.begin);
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage, last = (begin + range.nbytes) / kPage * kPage;
  // Pages that it shares with its neighbours stay.
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

bool share_mapping(c10::StorageImpl* s) {
  if (C10_LIKELY(ranges.load(std::memory_order_relaxed) == 0) || !is_mapped(s)) return false;
  std::vector<std::pair<Cell*, WeakStorage>> found;
  bool any = false;
  {
    std::lock_guard<std::mutex> lock(graph_lock());
    each_over_locked(s, [&](Cell* c) {
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
      pin(c, ticks());  // busy until the move ends, and then it stays
      const auto unpinned = c10::make_scope_exit([c = c] { unpin(c); });
      move_to_mapping(c);
      escape(c, Escape::kSlice);
    }
    drop(std::move(held));
  }
  return any;
}

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

// Cells over the file, and what keeps them alive.
static std::vector<std::pair<Cell*, WeakStorage>> cells_of_file(const char* path) {
  std::vector<std::pair<Cell*, WeakStorage>> found;
  struct stat wanted{}, one{};
  if (stat(path, &wanted) != 0) return found;
  std::lock_guard<std::mutex> lock(graph_lock());
  for (const std::weak_ptr<Mapping>& weak : mappings()) {
    const auto m = weak.lock();
    if (!m || m->fd < 0 || fstat(m->fd, &one) != 0 || one.st_dev != wanted.st_dev || one.st_ino != wanted.st_ino)
      continue;
    for (Cell* c : m->cells)
      if (!c->small) found.emplace_back(c, c->storage);
  }
  return found;
}

// The file is no copy of its bytes any more, and they never go back to the mapping.
static void forget_file_locked(Cell* c, Trash* trash) {
  c->range->overwritten = true;
  if (c->slot >= 0) trash->slots.push_back(std::exchange(c->slot, -1));
  count_root_locked(c);
}

// With a pin on it, so that it stays. False: it is absent, or in the mapping.
static bool forget_file_in_pool(Cell* c) {
  const bool there = pin(c, ticks());
  const auto unpinned = c10::make_scope_exit([c] { unpin(c); });
  if (!there || in_mapping(c)) return false;
  Trash trash;
  std::lock_guard<std::mutex> lock(graph_lock());
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
      if (const int error = mm_tier_read_now(budget.tier, c->slot, block.get()); error < 0)
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
    std::lock_guard<std::mutex> lock(graph_lock());
    forget_file_locked(c, &trash);
    if (absent) {
      last = come_back_locked(c, std::move(block), kNotFilled, &trash);
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
    // The address of one that has escaped was handed out: the file is under it as in plain torch.
    if (c->escape == Escape::kNone && !forget_file_in_pool(c)) move_to_pool(c);
    drop(std::move(held));
  }
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
  std::lock_guard<std::mutex> lock(graph_lock());
  for (const std::weak_ptr<Mapping>& weak : mappings())
    if (const auto m = weak.lock())
      for (const Cell* c : m->cells)
        if (has_file_copy(c)) bytes += c->nbytes;
  return bytes;
}

}  // namespace memmgr::pager
