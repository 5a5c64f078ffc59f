// Tier: a place below the device where bytes can be parked. The C ABI of tiers (core.h, device.h) calls this.
#pragma once

#include <errno.h>

#include <atomic>
#include <cstdint>

#include "memmgr/device.h"

namespace memmgr {

enum class Urgency { kQueued, kNow };

class Tier {
 public:
  // Ends all operations under way and deletes the tier. No other call may be under way.
  virtual void Close() = 0;

  virtual mm_slot Write(const void* from, uint64_t bytes, Urgency urgency) = 0;
  // See mm_tier_lend and mm_tier_check_lent.
  virtual mm_slot Lend(int /*fd*/, uint64_t /*offset*/, uint64_t /*bytes*/) { return -ENOTSUP; }
  virtual int CheckLent(mm_slot) { return -ENOTSUP; }
  // No copy of it was queued, and none will be before the next Write.
  virtual void Refused(const void* /*from*/) {}
  virtual int Read(mm_slot id, void* to, Urgency urgency) = 0;
  virtual int Poll(mm_slot id) = 0;
  virtual int Known(mm_slot id) { return Poll(id); }
  // A number that changes whenever an operation has ended since the last look. A look checks the oldest operations.
  virtual uint64_t Ended() { return ++looks_; }
  virtual int Wait(mm_slot id) = 0;
  virtual void Free(mm_slot id) = 0;
  virtual void Stats(mm_tier_stats* out) = 0;
  virtual void Inject(int write_errno, int after_writes, int read_errno, int after_reads) = 0;

  // Where memory is plain memory, ordering work after an operation means waiting for it.
  virtual int Use(mm_slot id, mm_stream) { return Wait(id); }
  virtual const void* Bytes(mm_slot) { return nullptr; }

 protected:
  Tier() = default;
  ~Tier() = default;
  Tier(const Tier&) = delete;
  Tier& operator=(const Tier&) = delete;

 private:
  std::atomic<uint64_t> looks_{0};
};

}  // namespace memmgr
