#include "file_tier.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>

namespace memmgr {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
// Long enough for the disk's full bandwidth, short enough to let a read in between.
constexpr uint64_t kPieceBytes = 4 * kMiB;
// The file grows in steps: fewer calls, and longer extents on the disk.
constexpr uint64_t kGrowBytes = 256 * kMiB;
constexpr int kDefaultWorkers = 2;

// A throttled piece must not take so long that the pace becomes a series of stops.
uint64_t PieceBytes(uint64_t bytes_per_second) {
  if (bytes_per_second == 0) return kPieceBytes;
  const uint64_t twentieth = bytes_per_second / 20 & ~(ScratchFile::kGrain - 1);
  return std::clamp<uint64_t>(twentieth, 64 * 1024, kPieceBytes);
}

// That this thread has run for.
uint64_t CpuNanoseconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(t.tv_nsec);
}

uint64_t RoundUp(uint64_t bytes) { return (bytes + ScratchFile::kGrain - 1) & ~(ScratchFile::kGrain - 1); }

}  // namespace

// ---- life ------------------------------------------------------------------------------------------------------

FileTier::FileTier(uint64_t capacity_bytes, uint64_t bytes_per_second)
    : capacity_bytes_(capacity_bytes == 0 ? INT64_MAX & ~(ScratchFile::kGrain - 1)
                                          : capacity_bytes & ~(ScratchFile::kGrain - 1)),
      bytes_per_second_(bytes_per_second),
      piece_bytes_(PieceBytes(bytes_per_second)) {
  stats_.capacity_bytes = capacity_bytes;
}

FileTier* FileTier::Open(const std::string& folder, uint64_t capacity_bytes, uint64_t bytes_per_second, int workers,
                         std::string* wrong) {
  const uint64_t no_room = 1;  // less than a grain
  auto* tier = new FileTier(folder.empty() ? no_room : capacity_bytes, bytes_per_second);
  const char* direct = getenv("MEMMGR_TIER_DIRECT");
  const bool want_direct = direct == nullptr || strcmp(direct, "0") != 0;
  if ((!folder.empty() && !tier->file_.Open(folder, want_direct, wrong)) ||
      !tier->StartWorkers(workers > 0 ? workers : kDefaultWorkers, wrong)) {
    delete tier;
    return nullptr;
  }
  tier->stats_.direct = tier->file_.direct() ? 1 : 0;
  tier->WatchForks();
  return tier;
}

bool FileTier::StartWorkers(int workers, std::string* wrong) {
  // Signals are for the threads of the program: a handler must not run on a stack of memmgr's.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    workers_.reserve(workers);
    for (int i = 0; i < workers; ++i) workers_.emplace_back([this] { Work(); });
  } catch (const std::system_error& error) {
    *wrong = std::string("cannot start a thread: ") + error.what();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  // One worker is enough to go on with.
  return !workers_.empty();
}

void FileTier::Close() {
  // In a forked child there are no workers to join, and the conditions count waiters that do not exist: nothing is
  // done.
  if (forked_.load()) return;
  {
    Hold hold(mutex_);
    closing_ = true;
  }
  work_.notify_all();
  for (std::thread& worker : workers_) worker.join();
  IgnoreForks();
  delete this;
}

// No transfer runs while the process forks: a direct read into memory that is being copied on write may end in the
// child's copy (open(2), notes on O_DIRECT). And the memory that the child inherits is complete.
void FileTier::BeforeFork() {
  if (forked_.load()) return;
  Hold hold(mutex_);
  forking_ = true;
  while (in_flight() > 0) settled_.wait(hold);
  heirs_.BeforeFork(stats_.used_bytes > 0);
  hold.release();
}

void FileTier::AfterForkInParent() {
  if (forked_.load()) return;
  Hold hold(mutex_, std::adopt_lock);
  heirs_.AfterForkInParent();
  forking_ = false;
  work_.notify_all();
  settled_.notify_all();
}

void FileTier::AfterForkInChild() {
  if (forked_.exchange(true)) return;
  heirs_.AfterForkInChild();
}

// ---- queues ----------------------------------------------------------------------------------------------------

void FileTier::Queue::PushBack(Slot* slot) {
  slot->queue = this;
  slot->previous = tail;
  slot->next = nullptr;
  (tail != nullptr ? tail->next : head) = slot;
  tail = slot;
}

void FileTier::Queue::PushFront(Slot* slot) {
  slot->queue = this;
  slot->previous = nullptr;
  slot->next = head;
  (head != nullptr ? head->previous : tail) = slot;
  head = slot;
}

void FileTier::Queue::Remove(Slot* slot) {
  (slot->previous != nullptr ? slot->previous->next : head) = slot->next;
  (slot->next != nullptr ? slot->next->previous : tail) = slot->previous;
  slot->queue = nullptr;
}

void FileTier::Start(Slot* slot, Direction direction, char* memory, Queue* queue, bool front) {
  slot->busy = true;
  slot->direction = direction;
  slot->memory = memory;
  slot->begun_bytes = 0;
  slot->done_bytes = 0;
  slot->error = 0;
  queued_bytes(direction) += slot->bytes;
  front ? queue->PushFront(slot) : queue->PushBack(slot);
  slot->bytes > piece_bytes_ ? work_.notify_all() : work_.notify_one();
}

void FileTier::MoveToFront(Slot* slot) {
  if (slot->queue == nullptr || slot == urgent_.head) return;
  slot->queue->Remove(slot);
  urgent_.PushFront(slot);
}

void FileTier::Work() {
  Hold hold(mutex_);
  while (!closing_) {
    Slot* slot = urgent_.head != nullptr ? urgent_.head : normal_.head;
    if (slot != nullptr && !forking_) {
      RunPiece(slot, &hold);
    } else {
      work_.wait(hold);
    }
  }
}

// Does the next piece of a queued slot, without the lock while the disk works. The slot cannot end during that: Free
// waits for pieces in flight.
void FileTier::RunPiece(Slot* slot, Hold* hold) {
  const Direction direction = slot->direction;
  const uint64_t at = slot->begun_bytes;
  const uint64_t bytes = std::min(piece_bytes_, slot->bytes - at);
  int error = at == 0 ? InjectedError(direction) : 0;
  slot->begun_bytes += bytes;
  if (slot->begun_bytes == slot->bytes) slot->queue->Remove(slot);
  ++slot->in_flight;
  CountTime();
  ++in_flight_[direction];
  const Clock::time_point until = Pace(direction, bytes);
  char* const memory = slot->memory + at;
  const uint64_t offset = slot->offset + at;
  const int lent_fd = slot->lent_fd;
  const struct stat lent = slot->lent;
  hold->unlock();

  const uint64_t ran_before = CpuNanoseconds();
  if (error == 0 && lent_fd >= 0)
    error = ReadLent(lent_fd, lent, memory, bytes, offset);
  else if (error == 0)
    error = direction == kWrite ? file_.Write(memory, bytes, offset) : file_.Read(memory, bytes, offset);
  const uint64_t ran = CpuNanoseconds() - ran_before;
  if (error == 0) std::this_thread::sleep_until(until);

  hold->lock();
  stats_.cpu_nanoseconds += ran;
  --slot->in_flight;
  CountTime();
  --in_flight_[direction];
  if (in_flight() == 0 && forking_) settled_.notify_all();
  if (error == 0) {
    slot->done_bytes += bytes;
    queued_bytes(direction) -= bytes;
    (direction == kWrite ? stats_.written_bytes : stats_.read_bytes) += bytes;
  } else {
    if (slot->error == 0) slot->error = error;
    if (slot->queue != nullptr) slot->queue->Remove(slot);  // the other pieces would be wasted
  }
  Settle(slot);
}

// The time since it was called last belongs to the directions whose pieces were under way, by their number.
void FileTier::CountTime() {
  const Clock::time_point now = Clock::now();
  const std::chrono::nanoseconds passed = now - std::exchange(timed_, now);
  if (in_flight() == 0) return;
  const uint64_t writing = static_cast<uint64_t>(passed.count()) * in_flight_[kWrite] / in_flight();
  stats_.write_nanoseconds += writing;
  stats_.read_nanoseconds += passed.count() - writing;
}

// Ends the operation after its last piece.
void FileTier::Settle(Slot* slot) {
  if (slot->queue != nullptr || slot->in_flight > 0) return;
  slot->busy = false;
  slot->result = slot->error;
  queued_bytes(slot->direction) -= slot->bytes - slot->done_bytes;
  const bool good = slot->error == 0 && slot->done_bytes == slot->bytes;
  if (slot->error != 0) ++stats_.errors;
  if (good) ++(slot->direction == kWrite ? stats_.writes : stats_.reads);
  if (slot->direction == kWrite) slot->written = good;
  char* const read_next = slot->read_next;
  slot->read_next = nullptr;
  if (good && read_next != nullptr) Start(slot, kRead, read_next, &urgent_, false);
  settled_.notify_all();
}

FileTier::Clock::time_point FileTier::Pace(Direction direction, uint64_t bytes) {
  if (bytes_per_second_ == 0) return {};
  const double seconds = static_cast<double>(bytes) / static_cast<double>(bytes_per_second_);
  Clock::time_point& pace = paces_[direction];
  pace = std::max(pace, Clock::now()) +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  return pace;
}

int FileTier::InjectedError(Direction direction) {
  Injection& injection = injections_[direction];
  if (injection.error == 0 || --injection.after > 0) return 0;
  return -std::exchange(injection.error, 0);
}

// ---- slots -----------------------------------------------------------------------------------------------------

mm_slot FileTier::IdOf(const Slot* slot) const {
  return static_cast<mm_slot>(slot->generation) << 32 | static_cast<mm_slot>(slot->index);
}

FileTier::Slot* FileTier::Find(mm_slot id) {
  const auto index = static_cast<uint64_t>(id) & UINT32_MAX;
  if (id < 0 || index >= slots_.size()) return nullptr;
  Slot* slot = &slots_[index];
  return slot->held && IdOf(slot) == id ? slot : nullptr;
}

// Frees the room that children could read, when the last of them has ended; with `revoke` now. True: some room became
// free.
bool FileTier::GiveBackInherited(bool revoke) {
  if (inherited_.empty() || (revoke && !heirs_.Revoke())) return false;
  const size_t before = inherited_.size();
  std::erase_if(inherited_, [&](const Inherited& room) {
    if (heirs_.Any(room.since, room.until)) return false;
    space_.Give(room.offset, room.room_bytes);
    return true;
  });
  return inherited_.size() < before;
}

// An offset in the file, or a negative errno with nothing taken.
int64_t FileTier::TakeRoom(uint64_t bytes) {
  GiveBackInherited(false);
  const int64_t offset = TakeFreshRoom(bytes);
  return offset == -ENOSPC && GiveBackInherited(true) ? TakeFreshRoom(bytes) : offset;
}

int64_t FileTier::TakeFreshRoom(uint64_t bytes) {
  uint64_t offset = space_.Take(bytes);
  if (offset == SlotSpace::kNone) {
    const uint64_t file = stats_.file_bytes;
    const uint64_t least = bytes - space_.FreeAtEnd(file);
    if (least > capacity_bytes_ - file) return -ENOSPC;
    uint64_t grow = std::min(std::max(least, kGrowBytes), capacity_bytes_ - file);
    int error = file_.Grow(file, file + grow);
    if (error != 0 && grow > least) {
      grow = least;
      error = file_.Grow(file, file + grow);
    }
    if (error != 0) return error;
    stats_.file_bytes += grow;
    space_.Give(file, grow);
    offset = space_.Take(bytes);
  }
  return static_cast<int64_t>(offset);
}

// So that TakeSlot does not throw, and neither does Free.
void FileTier::ReserveSlot() {
  if (!unused_.empty()) return;
  unused_.reserve(slots_.size() + 1);
  slots_.emplace_back();
  slots_.back().index = static_cast<uint32_t>(slots_.size() - 1);
  unused_.push_back(&slots_.back());
}

FileTier::Slot* FileTier::TakeSlot(uint64_t bytes) {
  Slot* slot = unused_.back();
  unused_.pop_back();
  slot->held = true;
  slot->written = false;
  slot->bytes = bytes;
  slot->forks = heirs_.forks();
  slot->result = 0;
  slot->lent_fd = -1;
  return slot;
}

mm_slot FileTier::Lend(int fd, uint64_t offset, uint64_t bytes) {
  if (forked_.load()) return -ECANCELED;
  struct stat file{};
  if (fstat(fd, &file) != 0) return -errno;
  if (bytes == 0 || offset + bytes > static_cast<uint64_t>(file.st_size)) return -EINVAL;
  Hold hold(mutex_);
  ReserveSlot();
  Slot* slot = TakeSlot(bytes);
  slot->written = true;
  slot->offset = offset;
  slot->room_bytes = 0;
  slot->lent_fd = fd;
  slot->lent = file;
  return IdOf(slot);
}

int FileTier::CheckLent(mm_slot id) {
  int fd;
  struct stat lent;
  {
    Hold hold(mutex_);
    const Slot* slot = Find(id);
    if (slot == nullptr || slot->lent_fd < 0) return -EBADF;
    fd = slot->lent_fd;
    lent = slot->lent;
  }
  return CheckFile(fd, lent);
}

int FileTier::CheckFile(int fd, const struct stat& lent) {
  struct stat now{};
  if (fstat(fd, &now) != 0) return -errno;
  const bool same = now.st_size == lent.st_size && now.st_mtim.tv_sec == lent.st_mtim.tv_sec &&
                    now.st_mtim.tv_nsec == lent.st_mtim.tv_nsec;
  // In a forked child the number may be another file's by now.
  return same && now.st_dev == lent.st_dev && now.st_ino == lent.st_ino ? 0 : -ESTALE;
}

// Through the page cache, which has the pages of a mapped file already.
int FileTier::ReadLent(int fd, const struct stat& lent, char* to, uint64_t bytes, uint64_t offset) {
  while (bytes > 0) {
    const ssize_t n = pread(fd, to, bytes, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return -errno;
    if (n == 0) return -ESTALE;  // it is shorter now
    to += n;
    bytes -= static_cast<uint64_t>(n);
    offset += static_cast<uint64_t>(n);
  }
  return CheckFile(fd, lent);  // checked after the read: a change before or during it is seen
}

mm_slot FileTier::Write(const void* from, uint64_t bytes, Urgency urgency) {
  if (forked_.load()) return -ECANCELED;
  if (from == nullptr || bytes == 0) return -EINVAL;
  mm_slot id;
  {
    Hold hold(mutex_);
    if (bytes > capacity_bytes_) return -ENOSPC;
    const uint64_t room = RoundUp(bytes);
    ReserveSlot();
    const int64_t offset = TakeRoom(room);
    if (offset < 0) return offset;
    Slot* slot = TakeSlot(bytes);
    slot->offset = static_cast<uint64_t>(offset);
    slot->room_bytes = room;
    stats_.used_bytes += room;
    stats_.used_peak_bytes = std::max(stats_.used_peak_bytes, stats_.used_bytes);
    const bool now = urgency == Urgency::kNow;
    Start(slot, kWrite, static_cast<char*>(const_cast<void*>(from)), now ? &urgent_ : &normal_, now);
    id = IdOf(slot);
  }
  if (urgency == Urgency::kQueued) return id;
  const int error = Wait(id);
  if (error == 0) return id;
  Free(id);
  return error;
}

// Nothing of this object changes in a child, so its threads need no lock.
int FileTier::ReadInChild(mm_slot id, char* to) {
  const Slot* slot = Find(id);
  if (slot == nullptr) return -EBADF;
  if (!slot->written) return slot->result != 0 ? slot->result : -EIO;
  if (slot->lent_fd >= 0) return ReadLent(slot->lent_fd, slot->lent, to, slot->bytes, slot->offset);
  if (!file_.Inherited()) return -ESTALE;
  const int error = file_.Read(to, slot->bytes, slot->offset);
  return heirs_.MayRead() ? error : -ESTALE;
}

int FileTier::Read(mm_slot id, void* to, Urgency urgency) {
  if (to == nullptr) return -EINVAL;
  if (forked_.load()) return urgency == Urgency::kNow ? ReadInChild(id, static_cast<char*>(to)) : -ECANCELED;
  {
    Hold hold(mutex_);
    Slot* slot = Find(id);
    if (slot == nullptr) return -EBADF;
    if (slot->busy) {
      if (slot->direction == kRead || slot->read_next != nullptr) return -EBUSY;
      // Written first, then read back. A thread needs it: the write is urgent now.
      slot->read_next = static_cast<char*>(to);
      MoveToFront(slot);
    } else if (!slot->written) {
      return slot->result != 0 ? slot->result : -EIO;
    } else {
      Start(slot, kRead, static_cast<char*>(to), &urgent_, urgency == Urgency::kNow);
    }
  }
  return urgency == Urgency::kNow ? Wait(id) : 0;
}

int FileTier::Poll(mm_slot id) {
  if (forked_.load()) return -ECANCELED;
  Hold hold(mutex_);
  const Slot* slot = Find(id);
  if (slot == nullptr) return -EBADF;
  if (slot->busy) return 0;
  return slot->result != 0 ? slot->result : 1;
}

int FileTier::Wait(mm_slot id) {
  if (forked_.load()) return -ECANCELED;
  Hold hold(mutex_);
  for (bool found = false;; found = true) {
    Slot* slot = Find(id);
    if (slot == nullptr) return found ? -ECANCELED : -EBADF;  // freed by another thread in between, or never allocated
    if (!slot->busy) return slot->result;
    if (slot->queue == nullptr || forking_) {
      settled_.wait(hold);
      continue;
    }
    MoveToFront(slot);  // the workers help
    RunPiece(slot, &hold);
  }
}

void FileTier::Free(mm_slot id) {
  if (forked_.load()) return;
  Hold hold(mutex_);
  Slot* slot = Find(id);
  if (slot == nullptr) return;
  slot->held = false;
  slot->generation = (slot->generation + 1) & INT32_MAX;
  slot->read_next = nullptr;
  if (slot->queue != nullptr) {
    slot->queue->Remove(slot);
    Settle(slot);
  }
  while (slot->busy) settled_.wait(hold);
  stats_.used_bytes -= slot->room_bytes;
  unused_.push_back(slot);
  if (slot->lent_fd >= 0) {
    // There is no room to give back.
  } else if (heirs_.Any(slot->forks, heirs_.forks())) {
    inherited_.push_back({slot->offset, slot->room_bytes, slot->forks, heirs_.forks()});
  } else {
    space_.Give(slot->offset, slot->room_bytes);
  }
  settled_.notify_all();
}

// ---- look ------------------------------------------------------------------------------------------------------

void FileTier::Stats(mm_tier_stats* out) {
  if (forked_.load()) {
    *out = {};
    return;
  }
  Hold hold(mutex_);
  *out = stats_;
}

void FileTier::Inject(int write_errno, int after_writes, int read_errno, int after_reads) {
  if (forked_.load()) return;
  Hold hold(mutex_);
  injections_[kWrite] = {write_errno, after_writes};
  injections_[kRead] = {read_errno, after_reads};
}

}  // namespace memmgr
