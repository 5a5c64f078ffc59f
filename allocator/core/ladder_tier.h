// LadderTier: a host tier with a file below it. Bytes from the device lie in page-locked memory, of at most a given
// size. The slots that have been there longest move on to the file, ahead of need, and are read back through the same
// memory.
//
// Words:
//   sinking  bytes in host memory that are being written to the file
//   sunk     bytes that are in the file; while they are in host memory, too, that room can be given at once
//   rising   bytes on their way from the file into room of the host tier; from there the copy to the device is queued
// A step down is taken when room is asked for, or nearly gone; there is no thread but the file's workers. Only a slot
// without a running copy moves (host_->Poll returns 1): a caller that waits for a read finds it where it was begun.
//
// Known limitations: the order of moves is that of the writes, not that of a plan, so a loop over states
// that are larger than the host memory reads all of them from the file. A block larger than the host memory has to
// stay.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "file_tier.h"
#include "fork.h"
#include "host_tier.h"

namespace memmgr {

class LadderTier final : public Tier, private ForkAware {
 public:
  static LadderTier* Open(Device* device, uint64_t host_bytes, const std::string& folder, uint64_t file_bytes,
                          uint64_t bytes_per_second, int workers, std::string* wrong);
  void Close() override;

  mm_slot Write(const void* from, uint64_t bytes, Urgency urgency) override;
  void Refused(const void* from) override { host_->Refused(from); }
  int Read(mm_slot id, void* to, Urgency urgency) override;
  int Poll(mm_slot id) override;
  int Wait(mm_slot id) override;
  void Free(mm_slot id) override;
  void Stats(mm_tier_stats* out) override;
  void Inject(int write_errno, int after_writes, int read_errno, int after_reads) override;
  int Use(mm_slot id, mm_stream stream) override;

  void AfterForkInChild() override { forked_.store(true); }  // a device's memory is no child's

 private:
  using Hold = std::unique_lock<std::mutex>;
  enum class Where { kHost, kSinking, kBoth, kFile, kRising };

  struct Entry {
    uint64_t bytes = 0;
    mm_slot host = -1;
    mm_slot file = -1;
    Where where = Where::kHost;
    void* target = nullptr;  // kRising: the block that the bytes are for
    int error = 0;           // of a rise that failed, until the next read
  };

  LadderTier(HostTier* host, FileTier* file) : host_(host), file_(file) {}
  ~LadderTier() = default;
  Entry* Find(mm_slot id);
  void Settle(mm_slot id, Entry* entry);
  void Sink(mm_slot id, Entry* entry);
  bool GiveRoom();
  Entry* SinkOldest();
  void SinkAhead();
  bool MakeRoom(Hold* hold);
  int AwaitRise(mm_slot id, Hold* hold);
  int Raise(mm_slot id, void* to, Hold* hold);

  HostTier* const host_;
  FileTier* const file_;
  std::atomic<bool> forked_{false};

  std::mutex mutex_;  // everything below; the tiers' own locks are taken inside it
  std::map<mm_slot, Entry> entries_;
  std::set<mm_slot> in_host_;  // kHost, the oldest first
  std::set<mm_slot> sinking_;  // kSinking and kBoth
  mm_slot next_ = 0;
  uint64_t used_peak_bytes_ = 0;
  int raising_ = 0;     // threads whose read may have taken room in the host that no entry has yet
  int file_error_ = 0;  // the last write to the file failed: it is full, or broken, until something is freed there
};

}  // namespace memmgr
