#include "locked_memory.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <new>
#include <system_error>
#include <utility>

#include "device_pages.h"
#include "memmgr/device.h"
#include "ordering.h"
#include "timed.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace memmgr {
namespace {

constexpr uint64_t kHugePage = uint64_t{2} << 20;
constexpr uint64_t kFirstPieceBytes = uint64_t{64} << 20;  // 20 ms at worst
constexpr uint64_t kUsualPieceBytes = uint64_t{1} << 30;
constexpr uint64_t kTouchBytes = uint64_t{32} << 20;  // at a time, by one thread
constexpr unsigned kTouchThreads = 8;
constexpr unsigned kPortableMemory = 1;  // CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTALLOC_PORTABLE

// For tests: mm_test_lock_pieces.
std::atomic<uint64_t> first_bytes{kFirstPieceBytes};
std::atomic<uint64_t> piece_bytes{kUsualPieceBytes};
std::atomic<bool> touch_first{true};

uint64_t PageBytes() {
  static const auto bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}
uint64_t UpTo(uint64_t unit, uint64_t bytes) { return (bytes + unit - 1) / unit * unit; }

// The memory that the system could give without swapping. UINT64_MAX: /proc/meminfo has no figure.
uint64_t AvailableBytes() {
  FILE* file = fopen("/proc/meminfo", "re");
  if (file == nullptr) return UINT64_MAX;
  char line[128];
  unsigned long long kilobytes = 0;
  bool found = false;
  while (!found && fgets(line, sizeof line, file) != nullptr)
    found = sscanf(line, "MemAvailable: %llu kB", &kilobytes) == 1;
  fclose(file);
  return found ? uint64_t{kilobytes} << 10 : UINT64_MAX;
}

// Signals are for the threads of the program: threads that are started while this lives get none.
class NoSignals {
 public:
  NoSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~NoSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  NoSignals(const NoSignals&) = delete;
  NoSignals& operator=(const NoSignals&) = delete;

 private:
  sigset_t before_;
};

// 0 or an errno. The advice returns an error where a write would end the process.
int Populate(char* from, uint64_t bytes) {
  while (madvise(from, bytes, MADV_POPULATE_WRITE) != 0) {
    if (errno == EAGAIN || errno == EINTR) continue;
    if (errno != EINVAL) return errno;
    for (uint64_t at = 0; at < bytes; at += PageBytes())
      *static_cast<volatile char*>(from + at) = 0;  // an older kernel
    return 0;
  }
  return 0;
}

}  // namespace

// ---- life ------------------------------------------------------------------------------------------------------

LockedMemory::LockedMemory(const mm_driver& driver, int ordinal, uint64_t capacity_bytes)
    : driver_(driver),
      ordinal_(ordinal),
      first_bytes_(first_bytes.load()),
      piece_bytes_(piece_bytes.load()),
      capacity_bytes_(capacity_bytes),
      end_(capacity_bytes) {}

bool LockedMemory::Open(std::string* wrong) {
  const Timed locking(&lock_nanoseconds_), waiting(&lock_wait_nanoseconds_);
  uint64_t first = EndOf(0, first_bytes_);
  const auto cannot = [&](const std::string& why) {
    *wrong = "cannot page-lock " + std::to_string(first) + " bytes of host memory: " + why;
    return false;
  };
  // Room for the first page to begin where a huge page may.
  reserved_bytes_ = UpTo(PageBytes(), end_) + kHugePage;
  void* at = mmap(nullptr, reserved_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return cannot(strerror(errno));
  reserved_ = at;
  base_ = reinterpret_cast<char*>(UpTo(kHugePage, reinterpret_cast<uintptr_t>(at)));
  madvise(at, reserved_bytes_, MADV_DONTFORK);

  CUresult error = Prepare(0, first);
  if (error == CUDA_SUCCESS) error = Register(0, first);
  if (error == CUDA_SUCCESS) {
    Add(0, first);
    return true;
  }
  Forget(0, first);
  if (error == CUDA_ERROR_NOT_SUPPORTED) {
    // Some platforms have no cuMemHostRegister. Slower: all of it at once.
    first = end_;
    void* slab = nullptr;
    error = driver_.MemHostAlloc(&slab, first, kPortableMemory);
    if (error != CUDA_SUCCESS) return cannot(DriverText(driver_, error) + ". Lower host=, or pass host=\"none\".");
    allocated_ = true;
    base_ = static_cast<char*>(slab);
    Add(0, first);
    return true;
  }
  for (uint64_t bytes = first / 2 / PageBytes() * PageBytes(); bytes > 0;
       bytes = bytes / 2 / PageBytes() * PageBytes()) {
    CUresult smaller = Prepare(0, bytes);
    if (smaller == CUDA_SUCCESS) smaller = Register(0, bytes);
    if (smaller == CUDA_SUCCESS) driver_.MemHostUnregister(base_);
    Forget(0, bytes);
    if (smaller != CUDA_SUCCESS) continue;
    return cannot(DriverText(driver_, error) + ". The largest size that worked is " + std::to_string(bytes) +
                  " bytes: lower host= to that.");
  }
  return cannot(DriverText(driver_, error) + ". No smaller size worked: pass host=\"none\".");
}

void LockedMemory::Start(std::vector<CUstream> streams) {
  streams_ = std::move(streams);
  Hold hold(mutex_);
  if (locked_end_ == end_) return;  // one piece is all
  try {
    const NoSignals none;
    thread_ = std::thread([this] { Work(); });
  } catch (const std::system_error&) {
    end_ = locked_end_;
    CountCapacity();
    return;
  }
  BeginAhead();
}

void LockedMemory::Stop() {
  if (!thread_.joinable()) return;
  {
    Hold hold(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

LockedMemory::~LockedMemory() {
  Stop();
  if (allocated_) {
    driver_.MemFreeHost(base_);
  } else {
    for (const auto& [begin, piece] : pieces_) driver_.MemHostUnregister(base_ + begin);
  }
  if (reserved_ != nullptr) munmap(reserved_, reserved_bytes_);
}

// ---- room ------------------------------------------------------------------------------------------------------

uint64_t LockedMemory::Take(uint64_t bytes, uint64_t* ticket) {
  Hold hold(mutex_);
  const uint64_t offset = space_.Take(bytes);
  if (offset != kNone) {
    std::prev(pieces_.upper_bound(offset))->second.used_bytes += bytes;
    used_bytes_ += bytes;
    BeginAhead();
    return offset;
  }
  *ticket = jobs_done_;
  if (growing_) return kSoon;
  Job job;
  if (!Plan(bytes, &job)) return kNone;
  Begin(std::move(job));
  return kSoon;
}

void LockedMemory::Give(uint64_t offset, uint64_t bytes) {
  Hold hold(mutex_);
  std::prev(pieces_.upper_bound(offset))->second.used_bytes -= bytes;
  used_bytes_ -= bytes;
  space_.Give(offset, bytes);
}

void LockedMemory::Await(uint64_t ticket) {
  const Timed waiting(&lock_wait_nanoseconds_);
  Hold hold(mutex_);
  changed_.wait(hold, [&] { return jobs_done_ != ticket || !growing_; });
}

// A piece is free, and nothing can be taken from it until it is merged.
void LockedMemory::Add(uint64_t begin, uint64_t bytes) {
  pieces_[begin] = {bytes, 0};
  locked_bytes_ += bytes;
  locked_end_ = std::max(locked_end_, begin + bytes);
  space_.AddWall(begin);
  space_.Give(begin, bytes);
}

// ---- growth ----------------------------------------------------------------------------------------------------

// Where a piece of at least `bytes` that begins here ends. A rest that would make a tiny piece belongs to it.
uint64_t LockedMemory::EndOf(uint64_t begin, uint64_t bytes) const {
  const uint64_t unit = std::max(std::min({kHugePage, first_bytes_, piece_bytes_}), PageBytes());
  if (end_ - begin <= UpTo(unit, bytes)) return end_;
  const uint64_t end = begin + UpTo(unit, bytes);
  return end_ - end < first_bytes_ ? end_ : end;
}

// The range to lock for a block that finds no room. False: there is none.
bool LockedMemory::Plan(uint64_t bytes, Job* job) const {
  if (bytes >= refused_bytes_) return false;
  job->wanted_bytes = bytes;
  if (locked_end_ < end_ && bytes <= end_ - locked_end_) {
    job->begin = locked_end_;
    job->end = EndOf(locked_end_, std::max(bytes, piece_bytes_));
    return true;
  }
  uint64_t begin = 0, end = 0;  // free pieces side by side, no more of them than are needed
  for (const auto& [at, piece] : pieces_) {
    if (piece.used_bytes > 0) {
      begin = end = at + piece.bytes;
      continue;
    }
    if (at != end) begin = at;  // the range in between is lost
    end = at + piece.bytes;
    while (begin < at && end - begin - pieces_.at(begin).bytes >= bytes) begin += pieces_.at(begin).bytes;
    if (end - begin < bytes) continue;
    job->begin = begin;
    job->end = end;
    return true;
  }
  if (end != locked_end_ || begin == end || end_ - begin < bytes) return false;
  // The last pieces, and the range that was never locked.
  for (uint64_t next = begin; next < end && end_ - next >= bytes; next += pieces_.at(next).bytes) begin = next;
  if (locked_end_ == end_) return false;
  job->begin = begin;
  job->end = EndOf(begin, bytes);
  return true;
}

void LockedMemory::Begin(Job job) {
  job.fresh = std::max(job.begin, locked_end_);
  // Takes no memory: an error in the middle would lose pieces.
  for (auto at = pieces_.lower_bound(job.begin); at != pieces_.end() && at->first < job.end;) {
    space_.Withdraw(at->first, at->second.bytes);
    space_.RemoveWall(at->first);
    locked_bytes_ -= at->second.bytes;
    job.merged.insert(pieces_.extract(at++));
  }
  job_ = std::move(job);
  growing_ = true;
  wake_.notify_one();
}

void LockedMemory::BeginAhead() {
  if (growing_ || locked_end_ == end_ || locked_bytes_ - used_bytes_ >= piece_bytes_ / 2) return;
  Job job;
  job.begin = locked_end_;
  job.end = EndOf(locked_end_, piece_bytes_);
  Begin(std::move(job));
}

void LockedMemory::Work() {
  Hold hold(mutex_);
  for (;;) {
    wake_.wait(hold, [&] { return stopping_ || growing_; });
    if (stopping_) {
      // The pieces that were to be merged are still locked.
      if (growing_) pieces_.merge(job_.merged);
      return;
    }
    Job job = std::move(job_);
    hold.unlock();
    Run(&job);
    hold.lock();
    try {
      Finish(job);
    } catch (const std::bad_alloc&) {
      end_ = locked_end_;
    }
    CountCapacity();
    growing_ = false;
    ++jobs_done_;
    changed_.notify_all();
    if (!stopping_) BeginAhead();
  }
}

// Without the lock.
void LockedMemory::Run(Job* job) {
  const Timed locking(&lock_nanoseconds_);
  // Page-locking has nothing to do with another thread's capture.
  const EnsureContext context(driver_, ordinal_);
  const RelaxedCapture relaxed(driver_);
  const uint64_t fresh_bytes = job->end - std::min(job->fresh, job->end);
  job->error = context.error();
  if (job->error != CUDA_SUCCESS) return;
  // The kernel would end a process rather than refuse it memory.
  if (fresh_bytes > AvailableBytes()) job->error = CUDA_ERROR_OUT_OF_MEMORY;
  if (job->error == CUDA_SUCCESS && fresh_bytes > 0) job->error = Prepare(job->fresh, job->end);
  std::map<uint64_t, Piece> unlocked;
  if (job->error == CUDA_SUCCESS && !job->merged.empty()) {
    // A slot is given back while its copies may still run.
    for (CUstream stream : streams_) {
      const CUresult error = Order<"relock.copies">([&] { return driver_.StreamSynchronize(stream); });
      if (job->error == CUDA_SUCCESS) job->error = error;
    }
    while (job->error == CUDA_SUCCESS && !job->merged.empty()) {
      job->error = driver_.MemHostUnregister(base_ + job->merged.begin()->first);
      if (job->error == CUDA_SUCCESS) unlocked.insert(job->merged.extract(job->merged.begin()));
    }
  }
  if (job->error == CUDA_SUCCESS) job->error = Register(job->begin, job->end);
  if (job->error == CUDA_SUCCESS) return;
  if (fresh_bytes > 0) Forget(job->fresh, job->end);
  while (!unlocked.empty()) {
    auto piece = unlocked.extract(unlocked.begin());
    const uint64_t begin = piece.key();
    const uint64_t end = begin + piece.mapped().bytes;
    if (Register(begin, end) == CUDA_SUCCESS)
      job->merged.insert(std::move(piece));
    else
      Forget(begin, end);
  }
}

void LockedMemory::Finish(const Job& job) {
  if (job.error == CUDA_SUCCESS) {
    Add(job.begin, job.end - job.begin);
    return;
  }
  uint64_t lost = std::min(job.fresh, job.end) - job.begin;
  for (const auto& [begin, piece] : job.merged) {
    lost -= piece.bytes;
    Add(begin, piece.bytes);
  }
  lost_bytes_ += lost;
  // A large block is refused from now on; a piece of the usual size shows that there is no more.
  if (job.wanted_bytes > piece_bytes_)
    refused_bytes_ = std::min(refused_bytes_, job.wanted_bytes);
  else
    end_ = locked_end_;
}

// ---- the system ------------------------------------------------------------------------------------------------

// Fresh memory can be written to, and its pages are there.
CUresult LockedMemory::Prepare(uint64_t begin, uint64_t end) {
  const uint64_t bytes = UpTo(PageBytes(), end) - begin;
  if (mprotect(base_ + begin, bytes, PROT_READ | PROT_WRITE) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
  madvise(base_ + begin, bytes, MADV_HUGEPAGE);  // not all kernels have them
  return Touch(base_ + begin, bytes) == 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void LockedMemory::Forget(uint64_t begin, uint64_t end) {
  const uint64_t bytes = UpTo(PageBytes(), end) - begin;
  madvise(base_ + begin, bytes, MADV_DONTNEED);
  mprotect(base_ + begin, bytes, PROT_NONE);
}

// The driver's own first touch is by one thread. 0 or an errno.
int LockedMemory::Touch(char* from, uint64_t bytes) {
  if (!touch_first) return 0;
  std::atomic<uint64_t> next{0};
  std::atomic<int> error{0};
  const auto touch = [&] {
    while (error == 0) {
      const uint64_t at = next.fetch_add(kTouchBytes);
      if (at >= bytes) return;
      if (stopping_) {
        error = ECANCELED;
        return;
      }
      const int result = Populate(from + at, std::min(kTouchBytes, bytes - at));
      if (result != 0) error = result;
    }
  };
  const uint64_t parts = (bytes + kTouchBytes - 1) / kTouchBytes;
  const uint64_t count = std::min<uint64_t>({parts, kTouchThreads, std::max(1u, std::thread::hardware_concurrency())});
  std::vector<std::thread> others;
  try {
    const NoSignals none;
    others.reserve(count);
    while (others.size() + 1 < count) others.emplace_back(touch);
  } catch (const std::system_error&) {  // fewer will do
  } catch (const std::bad_alloc&) {
  }
  touch();
  for (std::thread& other : others) other.join();
  return error;
}

CUresult LockedMemory::Register(uint64_t begin, uint64_t end) {
  return driver_.MemHostRegister(base_ + begin, UpTo(PageBytes(), end) - begin, kPortableMemory);
}

}  // namespace memmgr

extern "C" int mm_test_lock_pieces(uint64_t first, uint64_t piece, int touch) {
  memmgr::first_bytes = first != 0 ? first : memmgr::kFirstPieceBytes;
  memmgr::piece_bytes = piece != 0 ? piece : memmgr::kUsualPieceBytes;
  memmgr::touch_first = touch != 0;
  return 0;
}
