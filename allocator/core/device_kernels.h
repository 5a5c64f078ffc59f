// The kernels of device_kernels.cu on one device: sums, comparisons and fills of its memory in order of a stream,
// without fetching the bytes.
//
// The module is loaded at the first use. Where the driver lacks the calls for it, or refuses the module, Ready is false
// for as long as the device lives: two sums are comparable only if both were taken in the same way.
//
// A kernel leaves its result in a word of device memory, and another one writes that to a page-locked word behind it.
// The words are allocated once with the module and counted nowhere. A word belongs to one call, or one pending sum, at
// a time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "driver.h"
#include "lock.h"

// A sum that the device is still taking, or whose value has been read.
struct mm_sum {
  uint16_t word = 0;
  CUevent event = nullptr;  // behind the write of the word; null: `value` is set
  uint64_t value = 0;
  bool awaited = false;  // a thread waits for the event, and will read the word
  bool dropped = false;  // its result will not be read
};

namespace memmgr {

class DeviceKernels {
 public:
  DeviceKernels(const mm_driver& driver, int ordinal) : driver_(driver), ordinal_(ordinal) {}
  ~DeviceKernels();  // the device is idle; pending results end with it
  DeviceKernels(const DeviceKernels&) = delete;
  DeviceKernels& operator=(const DeviceKernels&) = delete;

  bool Ready();

  // 0 or -errno: -ENOSYS where Ready is false, -EBUSY while `stream` is being captured (nothing is queued then).
  int Fill(void* p, unsigned char byte, uint64_t bytes, CUstream stream);
  int Delay(uint64_t nanoseconds, CUstream stream);
  // These return when the stream has reached the result.
  // `fill` below 0: `second` was not filled. `found`: bits of mm_compared.
  int Compare(const void* first, const void* second, uint64_t bytes, int fill, CUstream stream, unsigned* found);
  int Sum(const void* p, uint64_t bytes, CUstream stream, uint64_t* sum);
  // Only queues the sum. Each begun sum is ended or dropped once.
  int BeginSum(const void* p, uint64_t bytes, CUstream stream, mm_sum** out);
  int EndSum(mm_sum* sum, uint64_t* value);
  bool SumIsThere(mm_sum* sum);  // EndSum would not wait
  void DropSum(mm_sum* sum);
  void EndDropped();  // frees the words of dropped results that the device has finished

  int SynchronizeStream(CUstream stream);  // works without kernels, too

  uint64_t errors() const { return errors_; }
  void AfterForkInChild() { lock_.Renew(); }

 private:
  class Using;
  enum State : int { kUnknown, kReady, kAbsent };

  bool Load();
  void Unload();
  // The argument of the kernels that examine memory.
  struct Look {
    CUdeviceptr a;
    CUdeviceptr b;  // 0: a sum is taken of `a`
    uint64_t bytes;
    uint64_t filled = 0;  // as of the kernel mm_compare
  };

  CUresult Launch(CUfunction function, uint64_t bytes, CUstream stream, void** arguments);
  CUresult LaunchFill(CUdeviceptr p, uint64_t word, uint64_t bytes, CUstream stream);
  // Queues the kernel that leaves its result in a word that the caller has taken.
  CUresult Queue(Look look, uint16_t word, CUstream stream);
  int Evaluate(const Look& look, CUstream stream, uint64_t* result);
  uint16_t TakeWord();
  void GiveWord(uint16_t word);
  uint64_t Read(uint16_t word) const;
  void HarvestLocked();
  void SettleLocked(mm_sum* sum);
  CUdeviceptr OnDevice(uint16_t word) const { return words_ + word * sizeof(uint64_t); }
  int Noted(CUresult error);

  const mm_driver& driver_;
  const int ordinal_;
  std::atomic<int> state_{kUnknown};
  CUmodule module_ = nullptr;
  CUfunction sum_ = nullptr, compare_ = nullptr, fill_ = nullptr, word_ = nullptr, delay_ = nullptr;
  CUdeviceptr words_ = 0;
  uint64_t* fetched_ = nullptr;  // the words' page-locked copies

  Lock loading_;  // held while the module is loaded; lock_ is a leaf below it
  Lock lock_;
  std::vector<uint16_t> free_;    // words
  std::vector<mm_sum*> pending_;  // oldest first
  std::vector<CUevent> events_;   // not in use
  std::atomic<uint64_t> errors_{0};
};

}  // namespace memmgr
