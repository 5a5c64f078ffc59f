#include "mapped.h"

#include <ATen/MapAllocator.h>
#include <Python.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "areas.h"
#include "budget.h"
#include "cell.h"
#include "escape.h"
#include "hold.h"
#include "pools/pool.h"
#include "private_member.h"
#include "reclaim.h"
#include "victims.h"

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

bool stays_in_mapping(const Cell* c) { return c->escape != Escape::kNone && in_mapping(c); }

// The cell is busy and the caller's, with its bytes in memory or in the file. Not for long: null, or why not.
const char* claim(Cell* c) {
  using Clock = std::chrono::steady_clock;
  for (const auto until = Clock::now() + std::chrono::seconds(10); Clock::now() < until;) {
    if (c->escape != Escape::kNone) return "its address has been handed out";
    uint32_t absent = kAbsent;
    if (begin_move(c)) return nullptr;
    {
      std::lock_guard<std::mutex> lock(graph_lock());
      if (has_file_copy(c) && c->state.compare_exchange_strong(absent, kAbsent | kBusy)) return nullptr;
    }
    if (c->state.load() & kAbsent) {
      pin(c, ticks());
      try {
        bring_back(c);
      } catch (...) {
        unpin(c);
        throw;
      }
      unpin(c);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return "an op that does not end uses it";
}

// The caller has it busy. Ends the move.
void move_to_mapping(Cell* c) {
  MappedRange& range = *c->range;
  at::DataPtr before;
  bool last;
  const bool absent = c->state.load() & kAbsent;
  if (absent && !has_file_copy(c)) {
    const int error = mm_tier_read_now(budget.tier, c->slot, range.begin);
    if (error < 0) {
      end_move(c, true);
      TORCH_CHECK(false, "memmgr: the disk tier failed: reading ", c->nbytes, " bytes back: ", std::strerror(-error));
    }
    try {
      check_sum(c, range.begin);
    } catch (...) {
      end_move(c, true);
      throw;
    }
  } else if (!absent && !in_mapping(c) && !has_file_copy(c)) {
    std::memcpy(range.begin, c->bytes.get(), c->nbytes);
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
        before = std::move(c->bytes);
        c->bytes = std::move(range.home);
        if (auto* s = c->storage._unsafe_get_target()) show_bytes(s, c->bytes.get(), c);
        note_home(c);
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
    pin(c, ticks());  // busy until the move ends, and then it stays
    move_to_mapping(c);
    try {
      escape(c, Escape::kSlice);
    } catch (...) {
      unpin(c);
      throw;
    }
    unpin(c);
    drop(std::move(held));
  }
  return any;
}

bool return_to_mapping(Cell* c) {
  if (!c->range || c->small || c->range->overwritten || c->escape != Escape::kNone || in_mapping(c)) return false;
  uint32_t absent = kAbsent;
  const bool below = c->absence == Absence::kOffloaded && c->slot >= 0;
  if (!begin_move(c) &&
      !(below && c->state.compare_exchange_strong(absent, kAbsent | kBusy, std::memory_order_acq_rel)))
    return false;
  move_to_mapping(c);
  return true;
}

void forsake_file(const char* path) {
  struct stat wanted{};
  if (stat(path, &wanted) != 0) return;
  std::vector<std::pair<Cell*, WeakStorage>> found;
  {
    std::lock_guard<std::mutex> lock(graph_lock());
    for (const std::weak_ptr<Mapping>& weak : mappings()) {
      const auto m = weak.lock();
      struct stat one{};
      if (!m || m->fd < 0 || fstat(m->fd, &one) != 0 || one.st_dev != wanted.st_dev || one.st_ino != wanted.st_ino)
        continue;
      for (Cell* c : m->cells)
        if (!c->small) found.emplace_back(c, c->storage);
    }
  }
  for (auto& [c, weak] : found) {
    StoragePtr held = weak.lock();
    if (!held || cell_of(held.get()) != c) continue;
    for (;;) {
      pin(c, ticks());
      try {
        bring_back(c);
      } catch (...) {
        unpin(c);
        throw;
      }
      unpin(c);
      if (c->escape != Escape::kNone)
        break;  // its address has been handed out, and the file is under it as in plain torch
      at::DataPtr block;
      if (in_mapping(c)) block = allocate_for(c);
      if (!begin_move(c)) {
        std::this_thread::yield();
        continue;
      }
      if (in_mapping(c)) std::memcpy(block.get(), c->bytes.get(), c->nbytes);
      bool last;
      {
        Trash trash;
        std::lock_guard<std::mutex> lock(graph_lock());
        c->range->overwritten = true;
        if (c->slot >= 0) trash.slots.push_back(std::exchange(c->slot, -1));
        count_root_locked(c);
        if (in_mapping(c)) {
          mm_arena_add_outside(c->pool->arena, -static_cast<int64_t>(c->nbytes));
          c->outside = false;
          c->range->home = std::move(c->bytes);
          c->bytes = std::move(block);
          show_bytes(held.get(), c->bytes.get(), c);
          note_home(c);
        }
        last = end_move_locked(c, false);
      }
      if (last) last_user_is_gone(c);
      break;
    }
    drop(std::move(held));
  }
}

static uint64_t sample_of(const void* data, uint64_t nbytes) {
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
