#include "pages.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <new>

namespace memmgr {
namespace {

void* HostReserve(void*, size_t bytes) {
  void* base = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  // No huge pages. One would bring 2 MiB into memory for a 4 KiB touch, khugepaged would fill holes again, and what we
  // give back of one stays with it until no part is in use: with the advice given to exactly the committed pages, a
  // remap of 1.4 GiB out of 3 left 1.1 GiB of memory in use that nobody could see in the process.
  madvise(base, bytes, MADV_NOHUGEPAGE);
  return base;
}

int HostCommit(void*, void* at, size_t bytes) { return mprotect(at, bytes, PROT_READ | PROT_WRITE) == 0 ? 0 : -errno; }

// The protection stays: one mapping for all that was ever committed, instead of two more for every hole.
int HostDecommit(void*, void* at, size_t bytes) { return madvise(at, bytes, MADV_DONTNEED) == 0 ? 0 : -errno; }

void HostRelease(void*, void* base, size_t bytes) { munmap(base, bytes); }

uint64_t LowBits(uint64_t n) { return n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1; }

}  // namespace

const PageOps& HostPages() {
  static const PageOps ops{.page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE)),
                           .give_back = GiveBack::kAtOnce,
                           .user = nullptr,
                           .reserve = HostReserve,
                           .commit = HostCommit,
                           .decommit = HostDecommit,
                           .release = HostRelease,
                           .settle = nullptr};
  return ops;
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
