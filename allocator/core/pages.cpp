#include "pages.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <new>

namespace memmgr {
namespace {

constexpr size_t kLeastMove = size_t{32} << 10;  // a move costs 3 us, giving back and clearing as much 6
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
          .moving = can_move ? Moving : nullptr};
}

void* HostPages::Reserve(void*, size_t bytes) {
  void* base = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  // No huge pages. One would bring 2 MiB into memory for a 4 KiB touch, khugepaged would fill holes again, and what we
  // give back of one stays with it until no part is in use: with the advice given to exactly the committed pages, a
  // remap of 1.4 GiB out of 3 left 1.1 GiB of memory in use that nobody could see in the process.
  madvise(base, bytes, MADV_NOHUGEPAGE);
  return base;
}

void HostPages::Release(void*, void* base, size_t bytes) { munmap(base, bytes); }

int HostPages::Commit(void* user, void* at, size_t bytes) {
  auto* self = static_cast<HostPages*>(user);
  const size_t moved = self->moving_ ? self->MoveTo(static_cast<char*>(at), bytes) : 0;
  if (moved == bytes) return 0;
  if (mprotect(static_cast<char*>(at) + moved, bytes - moved, PROT_READ | PROT_WRITE) == 0) return 0;
  const int error = -errno;
  if (moved > 0) GiveToSystem(static_cast<char*>(at), moved);  // refused is refused whole
  return error;
}

// The protection stays: one mapping for all that was ever committed, instead of two more for every hole.
int HostPages::Decommit(void* user, void* at, size_t bytes) {
  auto* self = static_cast<HostPages*>(user);
  if (self->moving_ && bytes >= kLeastMove) {
    try {
      self->loose_.push_back({static_cast<char*>(at), bytes});
      return 0;
    } catch (const std::bad_alloc&) {
      // given to the system instead
    }
  }
  return GiveToSystem(static_cast<char*>(at), bytes);
}

void HostPages::Moving(void* user, bool begin) {
  auto* self = static_cast<HostPages*>(user);
  self->moving_ = begin;
  if (begin) return;
  for (const Piece& piece : self->loose_) GiveToSystem(piece.at, piece.bytes);
  self->loose_.clear();
}

// Returns how many bytes from `to` on have memory now.
size_t HostPages::MoveTo(char* to, size_t bytes) {
  size_t done = 0;
  while (!loose_.empty() && bytes - done >= kLeastMove) {
    Piece& piece = loose_.back();
    size_t want = std::min(piece.bytes, bytes - done);
    const auto seam = seams_.upper_bound(piece.at);
    if (seam != seams_.end() && *seam < piece.at + want) want = static_cast<size_t>(*seam - piece.at);
    if (want < kLeastMove || !Move(piece.at, to + done, want)) {
      GiveToSystem(piece.at, want);
    } else {
      done += want;
    }
    piece.at += want;
    piece.bytes -= want;
    if (piece.bytes == 0) loose_.pop_back();
  }
  return done;
}

bool HostPages::Move(char* from, char* to, size_t bytes) {
  // What lies between the ends of the new mapping goes with those that it replaces.
  const auto covered = std::distance(seams_.upper_bound(to), seams_.lower_bound(to + bytes));
  if (seams_.size() - static_cast<size_t>(covered) + 2 > kMostSeams) return false;
  try {
    seams_.insert(to);
    seams_.insert(to + bytes);
  } catch (const std::bad_alloc&) {
    return false;
  }
  if (!MovePages(from, to, bytes)) {
    // The kernel may have made room there first, and nobody else shall get those addresses.
    mmap(to, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    return false;
  }
  seams_.erase(seams_.upper_bound(to), seams_.lower_bound(to + bytes));
  return true;
}

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
    set += std::popcount((words_[at / 64] >> (at % 64)) & LowBits(n));
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
