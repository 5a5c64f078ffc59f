// The pages of a device's arena, through the driver.
//
// Mapped: one handle for each page, because a mapping cannot be unmapped in part. A page that is given back to be
// mapped elsewhere keeps its handle until then (release_kept): to make a new one takes as long as to map it. No other
// memory is pooled: the driver's figures are ours at any time, and other programs get unused memory at once. A page's
// cost hardly depends on its size (an H100: 92 us from cuMemCreate to cuMemRelease for 2 MiB, 99 us for 32 MiB). Plain:
// one allocation of the whole range. Its pages count as committed from their first use on and never go back.
#pragma once

#include <atomic>
#include <memory>
#include <set>
#include <vector>

#include "driver.h"
#include "lock.h"
#include "pages.h"

namespace memmgr {

// An object that maps the bits of a set to streams.
class Settler {
 public:
  // The CPU waits for the queued work of these streams. 0 or -errno. Never called with a lock of the arena.
  virtual int Settle(StreamMask touched, const StreamTimes& times) = 0;

 protected:
  ~Settler() = default;
};

// While this lives the calling thread may make calls that a capture, its own or another thread's, would otherwise
// forbid. torch does the same around cudaMalloc.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const mm_driver& driver) : driver_(driver) {
    driver_.ThreadExchangeStreamCaptureMode(&mode_);
  }
  ~RelaxedCapture() { driver_.ThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const mm_driver& driver_;
  int mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

struct PageCounts {
  std::atomic<uint64_t> maps{0}, unmaps{0}, map_nanoseconds{0}, unmap_nanoseconds{0}, errors{0};
};

class DevicePages {
 public:
  DevicePages(const mm_driver& driver, int ordinal, Settler* settler);
  DevicePages(const DevicePages&) = delete;
  DevicePages& operator=(const DevicePages&) = delete;

  // The driver's error, 0 when all is well.
  CUresult UseMapped();
  CUresult UsePlain();
  // mm_device_allow
  int Allow(int peer_ordinal);
  const PageOps& ops() const { return ops_; }
  const PageCounts& counts() const { return counts_; }

 private:
  static DevicePages* Of(void* user) { return static_cast<DevicePages*>(user); }
  void* Reserve(size_t bytes);
  int Commit(CUdeviceptr at, size_t bytes);
  int Decommit(CUdeviceptr at, size_t bytes);
  void Release(CUdeviceptr base, size_t bytes);
  CUresult MapPage(uint64_t page);
  CUresult GrantAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc* to, size_t count);
  using Kept = std::vector<CUmemGenericAllocationHandle>;
  CUmemGenericAllocationHandle TakeHandle(Kept* kept, Kept* other, size_t bytes, CUresult* error);
  uint64_t TakeFrame();
  int MapFrames(CUdeviceptr at, const uint64_t* frames, size_t count);
  int UnmapFrames(CUdeviceptr at, size_t count);
  void ReleaseKept();
  void EndKept();
  bool HasRoom(uint64_t pages) const;
  uint64_t UnmapPages(uint64_t first, uint64_t end);
  bool UnmapRun(uint64_t first, uint64_t end);
  CUdeviceptr At(uint64_t page) const { return base_ + page * ops_.page_bytes; }
  CUresult Noted(CUresult error) {
    if (error != CUDA_SUCCESS && error != CUDA_ERROR_OUT_OF_MEMORY) ++counts_.errors;
    return error;
  }

  const mm_driver& driver_;
  const int ordinal_;
  Settler* const settler_;
  PageOps ops_{};
  PageCounts counts_;
  CUdeviceptr base_ = 0;
  bool integrated_ = false;  // its memory is the host's, and memory that the system could give back does not count as
                             // free

  Lock lock_;  // below that of the arena, which is not held when pages are given back
  std::unique_ptr<PageMap> mapped_;
  std::vector<CUmemGenericAllocationHandle> handles_;  // by page
  Kept kept_;                                          // of pages that were unmapped and are not mapped again yet
  Kept kept_frames_;                                   // frames that are mapped nowhere
  std::set<CUdeviceptr> at_frames_;                    // addresses at which frames are mapped
  uint64_t pages_ = 0;                                 // of the whole range
  std::vector<CUmemAccessDesc> access_;  // devices that may use the pages: the device itself, then its peers
};

}  // namespace memmgr
