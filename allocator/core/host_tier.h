// HostTier: blocks of a device parked in page-locked memory (the slab: locked_memory.h), in stream order.
//
// Words:
//   slot       room in the slab, with one operation after the other: its write, then any number of reads
//   operation  a copy between two events. Those of one direction are on one stream, so they end in the order in which
//              they began
//   fence      room that was given back while a copy from it or into it may still run
// The CPU waits in Wait, Bytes and Close only, and in Write while the slab grows. The calls below keep the
// copies exact, each by its name (ordering.h); for each, tests/driver/test_tier_waits.py shows that the bytes go wrong
// without it:
//
//   write    the write stream waits for    offload.touched     all streams that touched the block
//                                          offload.slot_reuse  reads by former owners of this piece of the slab
//            the block counts as touched   offload.source      by the write stream: it is still being read
//   read     the read stream waits for     reload.target       all streams that touched the block: its former users
//                                          reload.write_done   the host bytes: complete only behind the write
//            the block counts as touched   reload.filling      by the read stream: it may be freed unused
//   use      the caller's stream waits for use.read            the bytes on the device
//                                          use.write           the copy, before the block is written to
//   CPU      waits for                     wait.write, wait.read, bytes.write, close.writes, close.reads,
//                                          reserve.slot_reuse  copies of the room's former owners, before it is filled
//                                          fill.done           the copy of bytes that are not the slab's
//   fill     the read stream waits for     fill.target         all streams that touched the block
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device.h"
#include "driver.h"
#include "fork.h"
#include "locked_memory.h"
#include "tier.h"

namespace memmgr {

class HostTier final : public Tier, private ForkAware {
 public:
  static HostTier* Open(Device* device, uint64_t capacity_bytes, std::string* wrong);
  void Close() override;

  mm_slot Write(const void* from, uint64_t bytes, Urgency urgency) override;
  // The note of the last use is dropped: the program may use the block again.
  void Refused(const void* from) override { device_->NoteUse(from, kTail); }
  int Read(mm_slot id, void* to, Urgency urgency) override;
  int Poll(mm_slot id) override;
  int Known(mm_slot id) override;
  uint64_t Ended() override;
  int Wait(mm_slot id) override;
  void Free(mm_slot id) override;
  void Stats(mm_tier_stats* out) override;
  void Inject(int write_errno, int after_writes, int read_errno, int after_reads) override;
  int Use(mm_slot id, mm_stream stream) override;
  const void* Bytes(mm_slot id) override;

  // For a tier below this one (ladder_tier.h). A slot whose bytes the CPU writes into `room`, before any read from it.
  // Without `wait` -EAGAIN if copies of the room's former owners still run.
  mm_slot Reserve(uint64_t bytes, bool wait, void** room);
  // From any host memory into a live block, as a read of a slot would; returns when the bytes are there.
  int Fill(const void* from, uint64_t bytes, void* to);
  // The capacity of the slab. It gets smaller once the slab cannot grow any further.
  uint64_t capacity_bytes() const { return slab_.capacity_bytes(); }

  void AfterForkInChild() override { forked_.store(true); }

 private:
  enum Direction { kWrite = 0, kRead = 1 };
  using Hold = std::unique_lock<std::mutex>;

  struct Operation {
    Direction direction = kWrite;
    uint64_t number = 0;  // among those of its direction
    uint64_t bytes = 0;
    const void* block = nullptr;
    uint64_t mark = 0;        // of its end (device.h)
    CUevent begin = nullptr;  // both NULL once it is done
    CUevent end = nullptr;
    bool done = false;
    int error = 0;  // known when done
  };
  using OperationRef = std::shared_ptr<Operation>;

  // The operations of one direction.
  struct Link {
    CUstream stream = nullptr;
    std::deque<OperationRef> under_way;
    uint64_t begun = 0;
    uint64_t done = 0;
    std::map<const void*, OperationRef> blocks;  // the newest operation on a block, while it may still run
    int inject_error = 0;
    int inject_after = 0;
  };

  struct Slot {
    uint32_t index = 0;
    uint32_t generation = 0;  // of the slot's ids: a stale one is found out
    bool held = false;
    uint64_t offset = 0;
    uint64_t room_bytes = 0;
    uint64_t bytes = 0;
    OperationRef write;
    OperationRef read;  // the last one; null before the first
  };

  struct Fence {
    uint64_t begin;
    uint64_t end;
    OperationRef operation;
  };

  HostTier(Device* device, uint64_t capacity_bytes);
  ~HostTier() = default;
  const mm_driver& driver() const { return device_->driver(); }

  Slot* Find(mm_slot id);
  mm_slot IdOf(const Slot* slot) const;
  int TakeSlot(uint64_t bytes, bool wait, Hold* hold, Slot** out);
  void GiveSlot(Slot* slot);
  int TakeEvent(CUevent* event);
  CUresult Copy(Direction direction, const Slot& slot, void* block);
  int Queue(Direction direction, const Slot& slot, void* block, int error_later, OperationRef* out);
  int WaitForFormerReaders(uint64_t begin, uint64_t end);
  int WaitFor(CUstream waiter, const Operation* operation);
  void PollLink(Direction direction);
  void PollLinks() {
    PollLink(kWrite);
    PollLink(kRead);
  }
  bool AskOnce();
  void Finish(Link* link, CUresult result);
  int InjectedError(Direction direction);
  int Synchronize(OperationRef operation, Hold* hold);

  Device* const device_;
  std::atomic<bool> forked_{false};
  LockedMemory slab_;  // has a lock of its own, a leaf

  std::mutex mutex_;         // everything below; the device's own lock is taken inside it
  Direction asked_ = kRead;  // the way that AskOnce() asked about last
  std::array<Link, 2> links_;
  std::deque<Slot> slots_;  // addresses stay valid
  std::vector<Slot*> unused_;
  std::vector<Fence> fences_;
  uint64_t waited_reads_ = 0;    // the write stream is behind the reads before this number; the CPU need not be
  std::vector<CUevent> events_;  // for reuse
  mm_tier_stats stats_{};
};

}  // namespace memmgr
