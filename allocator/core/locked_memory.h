// LockedMemory: page-locked host memory of at most `capacity_bytes`, locked in pieces as it is needed.
//
// Words:
//   piece    a range that is registered with the driver by one call. No room crosses the end of a piece, because the
//            driver refuses a copy that crosses two registrations
//   ahead    the next piece is begun when less than half a piece of locked room is free
//   merge    free pieces that lie side by side, and the addresses behind the last one, are registered again as one
//            piece: for a block that is larger than any piece
// Page-locking takes up to 0.34 s per GiB, so one thread does it ahead of need. Addresses for the whole capacity are
// reserved at once and cost nothing. The first piece is small and locked by Open, so that an error is found there. A
// later piece that cannot be locked ends the growth: the capacity is then the locked size.
//
// Forks: a child has neither the thread nor the memory (MADV_DONTFORK): a page that the device writes to must not
// become copy-on-write, and a child would copy every page that is locked. The owner stops using this object there.
//
// Known limitations: room that is free on both sides of the end of a piece is not one room unless both pieces are free.
// A control group's limit is not looked at.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "driver.h"
#include "slot_space.h"

namespace memmgr {

class LockedMemory {
 public:
  static constexpr uint64_t kNone = SlotSpace::kNone;  // there is no such room
  static constexpr uint64_t kSoon = kNone - 1;         // a piece is being locked: Await, then Take again

  LockedMemory(const mm_driver& driver, int ordinal, uint64_t capacity_bytes);
  // Stops, unlocks and unmaps everything. The caller has the device's context, and no copy is under way.
  ~LockedMemory();
  LockedMemory(const LockedMemory&) = delete;
  LockedMemory& operator=(const LockedMemory&) = delete;

  // Reserves the addresses and locks the first piece. The caller has the device's context.
  bool Open(std::string* wrong);
  // Locks ahead from now on, in a thread of its own. `streams` are those of all copies from and to this memory.
  void Start(std::vector<CUstream> streams);
  // Waits for the thread, which gives up the piece that it is at.
  void Stop();

  // The offset of `bytes` that are now taken; kNone; or kSoon with a ticket for Await.
  uint64_t Take(uint64_t bytes, uint64_t* ticket);
  void Give(uint64_t offset, uint64_t bytes);
  void Await(uint64_t ticket);

  char* At(uint64_t offset) const { return base_ + offset; }
  uint64_t capacity_bytes() const { return capacity_bytes_.load(std::memory_order_relaxed); }
  // The time in which memory was being locked, and the part of it in which Open and Await waited.
  uint64_t lock_nanoseconds() const { return lock_nanoseconds_.load(std::memory_order_relaxed); }
  uint64_t lock_wait_nanoseconds() const { return lock_wait_nanoseconds_.load(std::memory_order_relaxed); }

 private:
  using Hold = std::unique_lock<std::mutex>;

  struct Piece {
    uint64_t bytes = 0;
    uint64_t used_bytes = 0;
  };
  // A range that is being locked.
  struct Job {
    uint64_t begin = 0;
    uint64_t end = 0;
    uint64_t fresh = 0;                // the bytes after it were never locked
    uint64_t wanted_bytes = 0;         // by a block; 0: ahead of need
    std::map<uint64_t, Piece> merged;  // the free pieces in it; after a failure those that are locked again
    CUresult error = CUDA_SUCCESS;
  };

  uint64_t EndOf(uint64_t begin, uint64_t bytes) const;
  bool Plan(uint64_t bytes, Job* job) const;
  void Begin(Job job);
  void BeginAhead();
  void Work();
  void Run(Job* job);
  void Finish(const Job& job);
  void Add(uint64_t begin, uint64_t bytes);
  void CountCapacity() { capacity_bytes_ = end_ - lost_bytes_; }
  CUresult Prepare(uint64_t begin, uint64_t end);
  void Forget(uint64_t begin, uint64_t end);
  int Touch(char* from, uint64_t bytes);
  CUresult Register(uint64_t begin, uint64_t end);

  const mm_driver& driver_;
  const int ordinal_;
  const uint64_t first_bytes_;
  const uint64_t piece_bytes_;
  std::atomic<uint64_t> capacity_bytes_;
  std::atomic<uint64_t> lock_nanoseconds_{0};
  std::atomic<uint64_t> lock_wait_nanoseconds_{0};
  void* reserved_ = nullptr;
  uint64_t reserved_bytes_ = 0;
  char* base_ = nullptr;
  bool allocated_ = false;  // by the driver, all at once: it cannot register memory
  std::vector<CUstream> streams_;
  std::thread thread_;

  std::mutex mutex_;                 // everything below; a leaf, and never held during a driver call
  std::condition_variable wake_;     // the thread: there is a job, or it has to stop
  std::condition_variable changed_;  // Await: a job has ended
  SlotSpace space_;
  std::map<uint64_t, Piece> pieces_;  // by offset
  uint64_t end_;                      // growth ends here
  uint64_t locked_end_ = 0;           // behind the last piece
  uint64_t lost_bytes_ = 0;           // between pieces: could not be locked again
  uint64_t locked_bytes_ = 0;
  uint64_t used_bytes_ = 0;
  uint64_t refused_bytes_ = UINT64_MAX;  // a piece for a block of this size could not be locked
  bool growing_ = false;                 // job_ is being done
  Job job_;
  uint64_t jobs_done_ = 0;
  std::atomic<bool> stopping_{false};
};

}  // namespace memmgr
