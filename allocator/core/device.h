// Device: an arena over a device's memory, in stream order. See include/memmgr/device.h for words and the rule.
//
// Streams are numbered as they are seen. A set of streams is a mask: the first 62 streams have a bit each, all later
// ones share one, and the last bit stands for work that we know nothing about.
//
// A mark is an event in a stream with a number. Numbers come from one clock for the whole process, which goes on by one
// at each mark. Work that was queued on a stream while the clock said t is over when any mark of that stream with a
// number above t has passed. A block carries such a time for each kind of stream that touched it, so that the next
// owner of its memory waits for the first mark above that time, and not for the stream's tail. Copies leave a mark
// each, since their end has an event anyway; the program's streams get one from mm_device_mark every few ops. Where a
// stream has no such mark yet its tail is waited for: longer than needed, never shorter.
//
// Locks, in the order in which they may be taken: the arena's for room, settling_, the arena's; streams_lock_,
// events_lock_, pools_lock_, lent_lock_ and that of the pages are leaves. marks_lock_ is taken before streams_lock_ and
// events_lock_ and after all others. No driver call is made under the arena's lock
// but those that map pages: they do not wait for streams. A thread that waits for a stream holds at most the lock for
// room and settling_, which frees and host functions never take; but a host function must not call memmgr (CUDA forbids
// host functions to call the driver, and an allocation may).
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "arena.h"
#include "device_kernels.h"
#include "device_pages.h"
#include "driver.h"
#include "fork.h"
#include "lock.h"
#include "memmgr/device.h"

namespace memmgr {

inline constexpr int kSharedBit = 62;
inline constexpr StreamMask kAnything = StreamMask{1} << 63;

class Device final : private ForkAware, private Settler {
 public:
  static Device* Open(const mm_driver& driver, int ordinal, uint64_t budget_bytes, int memory, std::string* wrong);
  static int Close(Device* device);  // 0; -1: the device stays open

  Arena& arena() { return *arena_; }
  const mm_driver& driver() const { return driver_; }
  DeviceKernels& kernels() { return kernels_; }
  int ordinal() const { return ordinal_; }
  bool forked() const { return forked_.load(std::memory_order_relaxed); }
  // While the result lives, the calling thread's context is this device's.
  [[nodiscard]] memmgr::EnsureContext EnsureContext() const { return {driver_, ordinal_}; }

  void* Alloc(uint64_t bytes, CUstream stream);
  void* TryAlloc(uint64_t bytes, uint64_t keep_free, CUstream stream);
  void Free(void* p);
  void Touch(const void* block, CUstream by);  // mm_device_used
  // The last use of the live block by the program was queued when the clock said `time` (mm_device_note_use). Holds for
  // the next wait for the block.
  void NoteUse(const void* block, uint64_t time);
  // A mark at the tail of a stream of the program (mm_device_mark).
  void MarkTail(CUstream stream);
  // A mark by an event that was recorded on a stream of MakeStream just now; its number. Until MarkEnded the event is
  // not used for anything else.
  uint64_t MarkCopy(CUstream stream, CUevent event);
  void MarkEnded(CUstream stream, uint64_t number);  // it has passed, and so have those before it
  // Blocks that the calling thread allocates do not make their stream wait: a user that waits for the block waits for
  // its former users, too. Only for blocks that a copy on another stream fills before their home uses them.
  static bool Defer(bool on);
  static const std::atomic<uint64_t>& Clock();  // mm_device_clock
  // All work that was queued on the live block comes before the next work of `by`, or its home waits for it.
  void Settled(const void* block);
  // The work that `by`, a stream of MakeStream, had queued before its mark `mark` is over, or the home of the live
  // block waits for it already. Only work that `by` queued later may touch the block. The memory may be larger than it
  // was when that was queued: a block inherits the touches of all runs that it was merged from.
  void Untouch(const void* block, CUstream by, uint64_t mark);
  CUstream Home(const void* block);
  int IsCapturing(CUstream stream);  // -1: not known to the driver
  int Synchronize();                 // 0 or -errno
  uint64_t Trim(uint64_t keep_bytes);

  // Opens a stream of memmgr's, closed with the device. NULL with the driver's error in *error.
  CUstream MakeStream(CUresult* error);
  void GiveStream(CUstream stream);  // for the next MakeStream: blocks may count as touched by it for long
  // All later work of `waiter` comes after the work queued now on the streams that touched the live block, or
  // on `other`. 0 or -errno; -EBUSY when one of them is being captured and cannot be waited for. When a stream cannot
  // be recorded (its owner destroyed it) the CPU waits instead.
  int WaitForTouched(CUstream waiter, const void* block);
  int WaitForTail(CUstream waiter, CUstream other);

  // Blocks of another allocator on this device (mm_device_lend): the arena counts them, their streams are kept here.
  void Lend(const void* block, uint64_t bytes, CUstream home);
  void LentEnds(const void* block);
  void ForgetLent();

  CUresult Copy(void* to, const void* from, size_t bytes, CUstream stream);
  CUresult Fetch(void* to_host, const void* from, size_t bytes, CUstream stream);
  CUresult Memory(size_t* free_bytes, size_t* total_bytes) const;
  int Allow(int peer_ordinal) { return forked() ? -1 : pages_.Allow(peer_ordinal); }

  int BeginPool(uint64_t a, uint64_t b);
  int EndPool(uint64_t a, uint64_t b);
  int ReleasePool(uint64_t a, uint64_t b);

  void Stats(mm_device_stats* out);
  void AfterForkInChild() override;

 private:
  struct Pool {
    uint64_t a, b;
    uint8_t number;
    uint64_t uses;  // begun and not released
  };
  struct Request {
    uint64_t bytes;
    bool only_try;
    uint64_t keep_free;
  };

  Device(const mm_driver& driver, int ordinal);
  ~Device();
  bool OpenArena(uint64_t budget_bytes, int memory, std::string* wrong);

  int Number(CUstream stream);  // -1: too many
  static StreamMask Bit(int number) { return StreamMask{1} << std::min(number, kSharedBit); }
  // The streams of a set that a stream has to wait for. Streams that share a bit wait for one another.
  static StreamMask Foreign(StreamMask touched, int number) {
    return number < kSharedBit ? touched & ~Bit(number) : touched;
  }
  std::vector<CUstream> StreamsOf(StreamMask touched, CUstream but);
  bool Capturing(CUstream stream, CUresult* error);
  bool AnyCapturing();

  void* AllocAt(const Request& request, CUstream stream);
  void* Place(const Request& request, StreamOrder* order);
  // The marks of one stream, by number. An event of a copy is the tier's.
  struct Marks {
    struct One {
      uint64_t number;
      CUevent event;
    };
    std::deque<One> pending;
    uint64_t passed = 0;  // the newest that is known to have
    bool copies = false;
  };
  StreamMask WaitFor(CUstream waiter, StreamMask touched, const StreamTimes& times);
  enum class Mark { kNone, kPassed, kQueued };
  Mark WaitForMark(CUstream waiter, int number, uint64_t time);
  int WaitUntil(CUstream waiter, CUstream other, uint64_t time);
  Marks* MarksOf(int number);
  void ForgetPassedMarks(Marks* marks);
  size_t KindOf(CUstream stream);
  int SynchronizeContext();
  int Settle(StreamMask touched, const StreamTimes& times) override;
  // The CPU waits: for all that these streams have queued, or had queued at a time.
  int SynchronizeAll(StreamMask touched, const StreamTimes& times = {{kTail, kTail, kTail}});
  CUevent TakeEvent();
  void ReturnEvent(CUevent event);
  Pool* FindPool(uint64_t a, uint64_t b);
  void EndUnusedPools();
  CUresult Noted(CUresult error) {
    if (error != CUDA_SUCCESS) ++driver_errors_;
    return error;
  }

  const mm_driver& driver_;
  const int ordinal_;
  const uint64_t serial_;  // no two devices of a process have the same
  DevicePages pages_;
  DeviceKernels kernels_;
  std::unique_ptr<Arena> arena_;
  std::atomic<bool> forked_{false};

  Lock streams_lock_;
  std::unordered_map<CUstream, uint16_t> numbers_;
  std::vector<CUstream> streams_;  // by number
  std::vector<CUstream> made_;     // ours
  std::vector<CUstream> given_;    // of these, given back

  Lock events_lock_;
  std::vector<CUevent> events_;  // not in use

  // In the order of creation: memmgr's own streams are of the kinds 1 and 2 by turns (a tier makes two).
  std::array<StreamMask, kStreamKinds> of_kind_{};  // under streams_lock_

  std::atomic<CUstream> settler_stream_{nullptr};  // on which the CPU waits for marks

  Lock marks_lock_;
  std::deque<Marks> marks_;  // by the stream's number

  struct Lent {
    uint64_t bytes;
    CUstream home;
    StreamMask touched;
    StreamTimes times;
  };
  // Calls `f` with the lent block at this address, if there is one.
  template <typename F>
  bool IfLent(const void* block, F f);

  Lock lent_lock_;
  std::unordered_map<const void*, Lent> lent_;
  std::atomic<bool> lends_{false};

  Lock settling_;

  Lock pools_lock_;
  std::vector<Pool> pools_;
  std::vector<uint8_t> active_;  // begun and not ended; the last one counts
  std::atomic<uint8_t> active_pool_{0};
  std::atomic<int> unused_pools_{0};  // released, with blocks

  std::atomic<uint64_t> waits_{0}, cross_reuses_{0}, synchronizations_{0}, driver_errors_{0};
};

template <typename F>
bool Device::IfLent(const void* block, F f) {
  if (!lends_.load(std::memory_order_relaxed)) return false;
  std::lock_guard hold(lent_lock_);
  const auto found = lent_.find(block);
  if (found == lent_.end()) return false;
  f(found->second);
  return true;
}

}  // namespace memmgr
