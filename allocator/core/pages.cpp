#include "pages.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <new>
#include <utility>

namespace memmgr {
namespace {

constexpr size_t kMostSeams = 16384;

int GiveToSystem(char* at, size_t bytes) { return madvise(at, bytes, MADV_DONTNEED) == 0 ? 0 : -errno; }

bool MovePages(char* from, char* to, size_t bytes) {
  return mremap(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, to) != MAP_FAILED;
}

// Linux 5.7 and later; not under a sandbox that refuses the call, nor where pages are locked.
bool CanMovePages() {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* at = mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return false;
  char* first = static_cast<char*>(at);
  first[0] = 1;
  const bool can = MovePages(first, first + page, page) && first[page] == 1 && GiveToSystem(first + page, page) == 0;
  munmap(at, 2 * page);
  return can;
}

// A failed call may have unmapped the old mapping first. No other mapping may get these addresses: our later calls
// would act on it.
void KeepAddresses(char* at, size_t bytes) {
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
  if (mmap(at, bytes, PROT_NONE, flags, -1, 0) != MAP_FAILED || errno == EEXIST) return;
  fprintf(stderr, "memmgr: lost %zu bytes of addresses at %p: %s\n", bytes, static_cast<void*>(at), strerror(errno));
  abort();
}

uint64_t LowBits(uint64_t n) { return n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1; }

}  // namespace

HostPages::HostPages() {
  static const bool can_move = CanMovePages();
  ops_ = {.page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE)),
          .give_back = GiveBack::kAtOnce,
          .user = this,
          .reserve = Reserve,
          .commit = Commit,
          .decommit = Decommit,
          .release = Release,
          .settle = nullptr,
          .release_kept = nullptr,
          .moving = can_move ? Moving : nullptr,
          .take_frame = nullptr,
          .give_frame = nullptr,
          .map_frames = nullptr,
          .unmap_frames = nullptr};
}

void* HostPages::Reserve(void* user, size_t bytes) {
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  char* base = static_cast<char*>(mmap(nullptr, bytes + kMostChunk, PROT_NONE, flags, -1, 0));
  if (base == MAP_FAILED) return nullptr;
  // Offsets in the area are aligned as addresses are.
  const size_t before = -reinterpret_cast<uintptr_t>(base) & (kMostChunk - 1);
  if (before > 0) munmap(base, before);
  base += before;
  munmap(base + bytes, kMostChunk - before);
  // No huge pages. One would bring 2 MiB into memory for a 4 KiB touch, khugepaged would fill holes again, and a part
  // of one that we give back stays in it until no part is in use: with the advice given to exactly the committed pages,
  // a remap of 1.4 GiB out of 3 left 1.1 GiB of memory in use that no figure of the process showed.
  madvise(base, bytes, MADV_NOHUGEPAGE);
  auto* self = static_cast<HostPages*>(user);
  self->begin_ = base;
  self->end_ = base + bytes;
  return base;
}

void HostPages::Release(void*, void* base, size_t bytes) { munmap(base, bytes); }

char* HostPages::Up(char* at) const { return Down(at + (chunk_bytes_ - 1)); }

char* HostPages::Down(char* at) const { return at - static_cast<size_t>(at - begin_) % chunk_bytes_; }

// Only whole chunks are moved. Every cut is the kernel's to keep and every later move's to stop at, and the cuts that
// blocks of any length make would come to lie ever closer: a step of a GPT took 240 moves at first, and 5,800 on
// average over 180 steps (270 now).
int HostPages::Commit(void* user, void* at, size_t bytes) {
  auto* self = static_cast<HostPages*>(user);
  char* const begin = static_cast<char*>(at);
  char* const end = begin + bytes;
  char* fresh = begin;  // later pages are not moved
  int error = 0;
  if (self->chunk_bytes_ != 0) {
    char* to = self->Up(begin);
    while (error == 0 && to < self->Down(end)) {
      const size_t moved = self->MoveTo(to, static_cast<size_t>(self->Down(end) - to));
      if (moved == 0) break;
      error = self->CommitFresh(fresh, to);
      fresh = to += moved;
    }
  }
  if (error == 0) error = self->CommitFresh(fresh, end);
  if (error != 0) GiveToSystem(begin, bytes);  // refused is refused whole
  return error;
}

// As far as blocks are aligned, so that the gap between two of them does not make three mappings of one. Such a gap
// takes no memory until it is touched. If the system counts it all the same and refuses, only the requested range.
int HostPages::CommitFresh(char* at, char* end) const {
  if (at == end) return 0;
  const auto misplaced = [](const char* p) { return reinterpret_cast<uintptr_t>(p) & (kMostChunk - 1); };
  char* const low = std::max(begin_, at - misplaced(at));
  char* const high = std::min(end_, end + (-misplaced(end) & (kMostChunk - 1)));
  if (mprotect(low, static_cast<size_t>(high - low), PROT_READ | PROT_WRITE) == 0) return 0;
  return mprotect(at, static_cast<size_t>(end - at), PROT_READ | PROT_WRITE) == 0 ? 0 : -errno;
}

// The protection stays: one mapping for all that was ever committed, instead of two more for every hole.
int HostPages::Decommit(void* user, void* at, size_t bytes) {
  auto* self = static_cast<HostPages*>(user);
  if (self->chunk_bytes_ != 0 && bytes >= self->chunk_bytes_) {
    try {
      self->loose_.push_back({static_cast<char*>(at), bytes});
      return 0;
    } catch (const std::bad_alloc&) {
      // given to the system instead
    }
  }
  return GiveToSystem(static_cast<char*>(at), bytes);
}

void HostPages::Moving(void* user, size_t chunk_bytes) {
  auto* self = static_cast<HostPages*>(user);
  self->chunk_bytes_ = chunk_bytes;
  if (chunk_bytes != 0) return;
  for (const Piece& piece : self->loose_) GiveToSystem(piece.at, piece.bytes);
  self->loose_.clear();
}

// Returns how many bytes from `to` on, where a chunk begins, have memory now; 0: nothing is left to be moved.
size_t HostPages::MoveTo(char* to, size_t bytes) {
  while (!loose_.empty()) {
    Piece& piece = loose_.back();
    char* const end = piece.at + piece.bytes;
    const auto [from, stop] = Uncut(piece.at, end);
    const size_t moved = std::min(static_cast<size_t>(stop - from), bytes);
    char* const next = from + moved;
    const bool done = moved > 0 && Move(from, to, moved);
    GiveUp(piece.at, done ? from : next);
    piece = {next, static_cast<size_t>(end - next)};
    if (piece.bytes == 0) loose_.pop_back();
    if (done) return moved;
  }
  return 0;
}

// The first whole chunks that no seam cuts; empty at the end where there are none.
std::pair<char*, char*> HostPages::Uncut(char* at, char* end) const {
  for (char* from = Up(at); from < end;) {
    const auto seam = seams_.upper_bound(from);
    char* const stop = seam != seams_.end() ? std::min(*seam, end) : end;
    if (Down(stop) > from) return {from, Down(stop)};
    from = Up(stop);
  }
  return {end, end};
}

// Where shorter chunks were moved before, seams lie so close that none can be moved from there ever again. A new
// mapping has none.
void HostPages::GiveUp(char* at, char* end) {
  if (at == end) return;
  char *const low = Up(at), *const high = Down(end);
  const auto first = seams_.upper_bound(low);
  if (low >= high || first == seams_.end() || *first >= high || !Renew(low, high)) {
    GiveToSystem(at, static_cast<size_t>(end - at));
    return;
  }
  if (at < low) GiveToSystem(at, static_cast<size_t>(low - at));
  if (high < end) GiveToSystem(high, static_cast<size_t>(end - high));
}

bool HostPages::Renew(char* low, char* high) {
  if (!Cut(low, high)) return false;
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  const auto bytes = static_cast<size_t>(high - low);
  if (mmap(low, bytes, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED) {
    KeepAddresses(low, bytes);
    return false;
  }
  madvise(low, bytes, MADV_NOHUGEPAGE);
  Join(low, high);
  return true;
}

bool HostPages::Move(char* from, char* to, size_t bytes) {
  if (!Cut(to, to + bytes)) return false;
  if (!MovePages(from, to, bytes)) {
    KeepAddresses(to, bytes);
    return false;
  }
  Join(to, to + bytes);
  return true;
}

// Called before a new mapping is made there. Seams between its ends disappear with the mappings that it replaces, and
// are not counted.
bool HostPages::Cut(char* low, char* high) {
  const auto covered = std::distance(seams_.upper_bound(low), seams_.lower_bound(high));
  if (seams_.size() - static_cast<size_t>(covered) + 2 > kMostSeams) return false;
  try {
    seams_.insert(low);
    seams_.insert(high);
  } catch (const std::bad_alloc&) {
    return false;
  }
  return true;
}

// Afterwards.
void HostPages::Join(char* low, char* high) { seams_.erase(seams_.upper_bound(low), seams_.lower_bound(high)); }

PageMap::PageMap(uint64_t pages) : words_bytes_((pages + 63) / 64 * 8) {
  void* at = mmap(nullptr, words_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  words_ = static_cast<uint64_t*>(at);
}

PageMap::~PageMap() { munmap(words_, words_bytes_); }

uint64_t PageMap::CountHoles(uint64_t first, uint64_t end) const {
  uint64_t set = 0;
  const uint64_t top = std::min(end, frontier_);
  for (uint64_t at = first; at < top;) {
    const uint64_t n = std::min(64 - at % 64, top - at);
    const uint64_t all = LowBits(n), bits = (words_[at / 64] >> (at % 64)) & all;
    set += bits == all ? n : static_cast<uint64_t>(std::popcount(bits));  // mostly all, and popcount is a call
    at += n;
  }
  return end - first - set;
}

void PageMap::Fill(uint64_t first, uint64_t end, bool value) {
  for (uint64_t at = first; at < end;) {
    const uint64_t n = std::min(64 - at % 64, end - at);
    const uint64_t mask = LowBits(n) << (at % 64);
    words_[at / 64] = value ? words_[at / 64] | mask : words_[at / 64] & ~mask;
    at += n;
  }
}

void PageMap::Set(uint64_t first, uint64_t end) {
  Fill(first, end, true);
  frontier_ = std::max(frontier_, end);
}

void PageMap::Clear(uint64_t first, uint64_t end) { Fill(first, std::min(end, frontier_), false); }

uint64_t PageMap::Next(uint64_t first, uint64_t end, bool value) const {
  const uint64_t top = std::min(end, frontier_);
  for (uint64_t at = first; at < top;) {
    const uint64_t n = std::min(64 - at % 64, top - at);
    const uint64_t word = value ? words_[at / 64] : ~words_[at / 64];
    const uint64_t hits = (word >> (at % 64)) & LowBits(n);
    if (hits != 0) return at + std::countr_zero(hits);
    at += n;
  }
  return value ? end : std::max(first, top);
}

uint64_t PageMap::Previous(uint64_t first, uint64_t end, bool value) const {
  if (!value && end > frontier_) return end > first ? end : first;
  for (uint64_t top = std::min(end, frontier_); top > first;) {
    const uint64_t low = std::max(first, (top - 1) / 64 * 64);
    const uint64_t word = value ? words_[low / 64] : ~words_[low / 64];
    const uint64_t hits = (word >> (low % 64)) & LowBits(top - low);
    if (hits != 0) return low + 64 - std::countl_zero(hits);
    top = low;
  }
  return first;
}

}  // namespace memmgr
