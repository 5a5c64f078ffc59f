// FileTier: slots in one scratch file, filled and emptied by a few workers.
//
// Words:
//   slot     room in the file for one write; it has at most one operation under way
//   piece    a part of an operation. Workers take piece by piece, so that several can work on one large operation, and
//            an operation that is needed now does not wait for the end of a large write
//   urgent   the queue that is served first: reads, and operations that a thread waits for
//   pace     the throttle: a clock per direction that runs ahead by the time that each piece may take
//   lent     a slot over a range of a file that is not the tier's: it is only read. A file whose size or time of
//            modification has changed since it was lent is an error, never other bytes
// A thread that waits for an operation does its pieces itself. So a wait never depends on a worker that is busy
// elsewhere, and ends without any worker.
//
// A forked child reads the slots that were written before the fork, and does nothing else. Their room is not used again
// while it lives (heirs.h), unless there is no other room; then its read is an error, never other bytes.
#pragma once

#include <sys/stat.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "file_io.h"
#include "fork.h"
#include "heirs.h"
#include "memmgr/core.h"
#include "slot_space.h"
#include "tier.h"

namespace memmgr {

class FileTier final : public Tier, private ForkAware {
 public:
  // An empty folder: without a file of its own, for slots that are lent; writes are refused.
  static FileTier* Open(const std::string& folder, uint64_t capacity_bytes, uint64_t bytes_per_second, int workers,
                        std::string* wrong);
  // Before the first transfer: the first so many bytes of the file go through the page cache. 0 or -errno.
  int Cache(uint64_t bytes) { return file_.Cache(bytes); }
  // Cancels queued operations, waits for those under way, and deletes the tier.
  void Close() override;

  mm_slot Write(const void* from, uint64_t bytes, Urgency urgency) override;
  mm_slot Lend(int fd, uint64_t offset, uint64_t bytes) override;
  int CheckLent(mm_slot id) override;
  int Read(mm_slot id, void* to, Urgency urgency) override;
  int Poll(mm_slot id) override;
  int Wait(mm_slot id) override;
  void Free(mm_slot id) override;
  void Stats(mm_tier_stats* out) override;
  void Inject(int write_errno, int after_writes, int read_errno, int after_reads) override;

  void BeforeFork() override;
  void AfterForkInParent() override;
  void AfterForkInChild() override;

 private:
  enum Direction { kWrite = 0, kRead = 1 };
  using Clock = std::chrono::steady_clock;
  using Hold = std::unique_lock<std::mutex>;
  struct Queue;

  struct Slot {
    uint32_t index = 0;
    uint32_t generation = 0;  // of the slot's ids: a stale one is found out
    bool held = false;
    bool written = false;  // the last write succeeded: there is something to read
    uint64_t offset = 0;
    uint64_t room_bytes = 0;
    uint64_t bytes = 0;
    uint64_t forks = 0;  // there had been so many when it was taken
    int lent_fd = -1;    // of a lent slot: the file, not the tier's to close
    struct stat lent{};  // how that file was then
    int result = 0;      // of the last operation

    // The operation under way, if any.
    bool busy = false;
    Direction direction = kWrite;
    char* memory = nullptr;
    uint64_t begun_bytes = 0;  // pieces up to here were taken
    uint64_t done_bytes = 0;
    int in_flight = 0;          // pieces
    int error = 0;              // of the first piece that failed
    Queue* queue = nullptr;     // while pieces are left to take
    char* read_next = nullptr;  // a read that was requested while the write is under way
    Slot* previous = nullptr;
    Slot* next = nullptr;
  };

  struct Queue {
    Slot* head = nullptr;
    Slot* tail = nullptr;
    void PushBack(Slot* slot);
    void PushFront(Slot* slot);
    void Remove(Slot* slot);
  };

  // Room without an owner here that a child may read.
  struct Inherited {
    uint64_t offset;
    uint64_t room_bytes;
    uint64_t since, until;  // forks: before it was taken, and before it was given back
  };

  struct Injection {
    int error = 0;
    int after = 0;
  };

  FileTier(uint64_t capacity_bytes, uint64_t bytes_per_second);
  ~FileTier() = default;
  bool StartWorkers(int workers, std::string* wrong);
  void Work();

  Slot* Find(mm_slot id);
  void ReserveSlot();
  Slot* TakeSlot(uint64_t bytes);
  mm_slot IdOf(const Slot* slot) const;
  int64_t TakeRoom(uint64_t bytes);
  int64_t TakeFreshRoom(uint64_t bytes);
  bool GiveBackInherited(bool revoke);
  int ReadInChild(mm_slot id, char* to);
  static int CheckFile(int fd, const struct stat& lent);
  static int ReadLent(int fd, const struct stat& lent, char* to, uint64_t bytes, uint64_t offset);
  void Start(Slot* slot, Direction direction, char* memory, Queue* queue, bool front);
  void MoveToFront(Slot* slot);
  void RunPiece(Slot* slot, Hold* hold);
  void Settle(Slot* slot);
  int InjectedError(Direction direction);
  void CountTime();
  int in_flight() const { return in_flight_[kWrite] + in_flight_[kRead]; }
  Clock::time_point Pace(Direction direction, uint64_t bytes);
  uint64_t& queued_bytes(Direction d) { return d == kWrite ? stats_.queued_write_bytes : stats_.queued_read_bytes; }

  const uint64_t capacity_bytes_;
  const uint64_t bytes_per_second_;
  const uint64_t piece_bytes_;
  ScratchFile file_;
  std::vector<std::thread> workers_;
  std::atomic<bool> forked_{false};

  std::mutex mutex_;  // everything below
  std::condition_variable work_;
  std::condition_variable settled_;
  bool closing_ = false;
  bool forking_ = false;            // no piece begins
  std::array<int, 2> in_flight_{};  // pieces of all slots, by direction
  Clock::time_point timed_{};       // their time is counted up to here
  Queue urgent_;
  Queue normal_;
  SlotSpace space_;
  std::deque<Slot> slots_;  // addresses stay valid
  std::vector<Slot*> unused_;
  Heirs heirs_;
  std::vector<Inherited> inherited_;
  std::array<Injection, 2> injections_;
  std::array<Clock::time_point, 2> paces_{};
  mm_tier_stats stats_{};
};

}  // namespace memmgr
