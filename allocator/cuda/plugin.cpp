// CUDA's allocator in torch: every block of every device comes from memmgr's arenas, unlimited until a budget opens,
// and every query of torch.cuda about its memory is answered.
//
// Compiled on the user's machine for the torch that is installed there (memmgr/native/cuda.py). One translation unit;
// links c10 and c10_cuda; no Python. The devices' memory is the core's (memmgr/device.h); the pager decides about an
// allocation under a budget (memmgr/plugin.h). Long: one subclass with an answer for each of torch's virtual functions.
#include "memmgr/plugin.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "earlier.h"
#include "history.h"
#include "meter.h"

// clang-format off
#include "meter.cpp"
// clang-format on

namespace memmgr {
namespace {

using namespace c10::cuda::CUDACachingAllocator;
using c10::CachingDeviceAllocator::BlockInfo;
using c10::CachingDeviceAllocator::DeviceStats;
using c10::CachingDeviceAllocator::SegmentInfo;
using c10::cuda::CUDAStream;

constexpr int kMaxDevices = 64;

// Returns the device's memory by the runtime, or 0. A memory fraction is a share of the larger one of this and the
// driver's total.
uint64_t RuntimeTotal(int ordinal) {
  cudaDeviceProp properties;
  return cudaGetDeviceProperties(&properties, ordinal) == cudaSuccess ? properties.totalGlobalMem : 0;
}

void Release(void* p);

std::string Megabytes(uint64_t bytes) {
  const bool large = bytes >= uint64_t{1} << 30;
  const uint64_t unit = large ? uint64_t{1} << 30 : uint64_t{1} << 20;
  const uint64_t hundredths = bytes % unit * 100 / unit;
  return std::to_string(bytes / unit) + (hundredths < 10 ? ".0" : ".") + std::to_string(hundredths) +
         (large ? " GiB" : " MiB");
}

c10::DeviceIndex CurrentDevice() {
  c10::DeviceIndex device = 0;
  C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
  return device;
}

class Allocator final : public CUDAAllocator {
 public:
  // ---- set-up ----

  void Use(const char* driver, int memory) {
    driver_ = driver ? driver : "";
    memory_ = memory;
  }
  // torch's own allocator is in use already: from now on this one allocates.
  void TakeOver(CUDAAllocator* torchs) {
    earlier_.Follow(torchs);
    init(c10::cuda::device_count());
  }
  c10::DeleterFnPtr EarlierDeleter() const {
    const CUDAAllocator* torchs = earlier_.torchs();
    return torchs ? torchs->raw_deleter() : nullptr;
  }
  // Its cached memory goes back to the device if that is `worth` it: blocks of so many bytes were freed.
  bool TrimEarlier(uint64_t worth) {
    if (C10_LIKELY(!earlier_.torchs()) || earlier_.freed_bytes() < worth) return false;
    if (active_pools_.load() > 0) return false;  // a capture that another thread has begun forbids it
    earlier_.Trim();
    return true;
  }
  // Memory of the parent cannot be used, nor given back. With none, the child may begin anew: CUDA allows it.
  void AfterForkInChild() {
    for (const auto& slot : meters_)
      if (slot.load()) forked_ = true;
  }
  void SetHooks(const mm_plugin_hooks* hooks) { hooks_ = hooks; }

  Meter* Opened(int ordinal) const {
    return ordinal >= 0 && ordinal < kMaxDevices ? meters_[static_cast<size_t>(ordinal)].load() : nullptr;
  }

  Meter* Open(int ordinal, std::string* wrong) {
    if (Meter* meter = Opened(ordinal)) return meter;
    if (ordinal < 0 || ordinal >= kMaxDevices || forked_) {
      *wrong = forked_ ? "a forked child cannot use CUDA" : "no device " + std::to_string(ordinal);
      return nullptr;
    }
    std::lock_guard hold(opening_);
    if (Meter* meter = Opened(ordinal)) return meter;
    char text[256] = "";
    const mm_driver* driver = mm_driver_load(driver_.empty() ? nullptr : driver_.c_str(), text, sizeof text);
    mm_device* device = driver ? mm_device_open(driver, ordinal, MM_UNLIMITED, memory_, text, sizeof text) : nullptr;
    *wrong = text;
    if (!device) return nullptr;
    Meter* meter = new Meter(device, RuntimeTotal(ordinal));  // lives as long as the process: its tensors may
    if (CUDAAllocator* torchs = earlier_.torchs()) {
      meter->SetFraction(torchs->getMemoryFraction(static_cast<c10::DeviceIndex>(ordinal)));
      earlier_.CountIn(ordinal, meter->arena());
    }
    meters_[static_cast<size_t>(ordinal)] = meter;
    return meter;
  }

  Meter& At(int ordinal) {
    std::string wrong;
    Meter* meter = Open(ordinal, &wrong);
    TORCH_CHECK(
        meter, "memmgr: the memory of GPU ", ordinal, " cannot be managed: ", wrong,
        ". MEMMGR_CUDA_MEMORY=plain does without virtual memory; MEMMGR_INSTALL=0 leaves torch's own allocator.");
    return *meter;
  }

  Meter* OwnerOf(const void* p) const {
    for (const auto& slot : meters_) {
      Meter* meter = slot.load(std::memory_order_relaxed);
      if (meter && mm_arena_owns(meter->arena(), p)) return meter;
    }
    return nullptr;
  }

  // ---- blocks ----

  void* Take(c10::DeviceIndex ordinal, size_t bytes, cudaStream_t stream) {
    Meter& meter = At(ordinal);
    ContextRef context = history_.on() ? history_.Gather(RecordContext::STATE) : nullptr;
    const mm_plugin_hooks* hooks = hooks_.load(std::memory_order_acquire);
    if (hooks && hooks->ordinal != ordinal) hooks = nullptr;
    void* p = nullptr;
    const bool may_trim = C10_UNLIKELY(earlier_.freed_bytes() > 0) && !mm_device_is_capturing(meter.device(), stream);
    if (may_trim) TrimEarlier(kWorthTrim);
    if (hooks) {
      p = hooks->allocate(bytes, stream);
    } else {
      p = mm_device_alloc(meter.device(), bytes, stream);
      if (!p && mm_device_trim(meter.device(), 0) > 0) {
        meter.Retried();
        p = mm_device_alloc(meter.device(), bytes, stream);
      }
    }
    if (!p && may_trim && TrimEarlier(1))
      p = hooks ? hooks->allocate(bytes, stream) : mm_device_alloc(meter.device(), bytes, stream);
    if (!p) Fail(meter, ordinal, bytes, stream, hooks, std::move(context));
    Handed(meter, ordinal, p, bytes, stream, std::move(context));
    return p;
  }

  void* Try(int ordinal, size_t bytes, uint64_t keep_free, mm_stream home) {
    Meter* meter = Opened(ordinal);
    void* p = meter ? mm_device_try_alloc(meter->device(), bytes, keep_free, home) : nullptr;
    if (p) Handed(*meter, static_cast<c10::DeviceIndex>(ordinal), p, bytes, home, nullptr);
    return p;
  }

  void GiveBack(void* p) {
    Meter* meter = p && !forked_ ? OwnerOf(p) : nullptr;
    if (!meter) return;
    const auto device = static_cast<c10::DeviceIndex>(mm_device_ordinal(meter->device()));
    if (C10_UNLIKELY(history_.on())) {
      const size_t bytes = mm_arena_block_bytes(meter->arena(), p);
      const mm_stream home = mm_device_home(meter->device(), p);
      ContextRef context = history_.Gather(RecordContext::ALL);
      history_.Note(TraceEntry::FREE_REQUESTED, device, p, bytes, home, context);
      history_.Note(TraceEntry::FREE_COMPLETED, device, p, bytes, home, std::move(context));
    }
    if (C10_UNLIKELY(c10::memoryProfilingEnabled())) TellProfiler(*meter, device, p, false);
    if (const auto* trace = c10::impl::GPUTrace::get_trace(); C10_UNLIKELY(trace))
      (*trace)->trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<uintptr_t>(p));
    const mm_plugin_hooks* hooks = hooks_.load(std::memory_order_acquire);
    if (hooks && hooks->ordinal == device) hooks->freed(mm_arena_block_bytes(meter->arena(), p));
    meter->Freed(p);
    mm_device_free(meter->device(), p);
  }

  c10::DataPtr allocate(size_t bytes) override {
    const c10::DeviceIndex ordinal = CurrentDevice();
    const c10::Device device(c10::DeviceType::CUDA, ordinal);
    void* p = bytes == 0 ? nullptr : Take(ordinal, bytes, c10::cuda::getCurrentCUDAStream(ordinal).stream());
    return {p, p, &Release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    C10_CUDA_CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToDevice));
  }

  void* raw_alloc(size_t bytes) override {
    if (bytes == 0) return nullptr;
    const c10::DeviceIndex ordinal = CurrentDevice();
    return Take(ordinal, bytes, c10::cuda::getCurrentCUDAStream(ordinal).stream());
  }
  void* raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override {
    return bytes == 0 ? nullptr : Take(CurrentDevice(), bytes, stream);
  }
  void raw_delete(void* p) override {
    CUDAAllocator* torchs = earlier_.torchs();
    if (C10_UNLIKELY(torchs && p && !OwnerOf(p))) return torchs->raw_delete(p);
    Release(p);
  }

  using CUDAAllocator::recordStream;
  void recordStream(const c10::DataPtr& data, CUDAStream stream) override {
    Meter* meter = data.get() ? OwnerOf(data.get()) : nullptr;  // else another process's, or from another allocator
    if (meter) return mm_device_used(meter->device(), data.get(), stream.stream());
    if (CUDAAllocator* torchs = earlier_.torchs()) torchs->recordStream(data, stream);
  }

  // ---- the allocator as a whole ----

  void init(int device_count) override { device_count_ = device_count; }
  bool initialized() override { return device_count_ >= 0; }
  void enable(bool) override {}
  bool isEnabled() const override { return true; }
  std::string name() override { return "memmgr"; }

  void emptyCache(c10::MempoolId_t) override {
    TrimEarlier(0);
    for (const auto& slot : meters_)
      if (Meter* meter = slot.load()) mm_device_trim(meter->device(), 0);
  }

  double getMemoryFraction(c10::DeviceIndex ordinal) override {
    Meter* meter = Opened(ordinal);
    return meter ? meter->fraction() : 1;
  }
  void setMemoryFraction(double fraction, c10::DeviceIndex ordinal) override {
    TORCH_CHECK(0 <= fraction && fraction <= 1, "invalid fraction:", fraction, ". Please set within [0, 1].");
    At(ordinal).SetFraction(fraction);
  }

  // cudnn chooses kernels by the workspace that it could have. The answer does not depend on how full the budget is: a
  // tight one must not change the choice.
  void cacheInfo(c10::DeviceIndex ordinal, size_t* largest) override { *largest = At(ordinal).total_bytes(); }

  void* getBaseAllocation(void* p, size_t* bytes) override {
    Meter* meter = OwnerOf(p);
    if (CUDAAllocator* torchs = earlier_.torchs(); torchs && !meter) return torchs->getBaseAllocation(p, bytes);
    const size_t block = meter ? mm_arena_block_bytes(meter->arena(), p) : 0;
    TORCH_CHECK(block > 0, "memmgr: ", p, " is not the start of a block of this allocator");
    if (bytes) *bytes = block;
    return p;
  }

  std::vector<StreamSegmentSize> getExpandableSegmentSizes(c10::DeviceIndex) override { return {}; }

  // ---- figures ----

  // With torch's own allocator the peaks of both are added, so after a reset they may be too high, and never too low.
  DeviceStats getDeviceStats(c10::DeviceIndex ordinal) override {
    CUDAAllocator* torchs = earlier_.torchs();
    DeviceStats out = torchs ? torchs->getDeviceStats(ordinal) : DeviceStats();
    out.max_split_size = -1;  // blocks of any size are split
    Meter* meter = Opened(ordinal);
    if (!meter) return out;
    const MemoryStats now = meter->Stats();
    for (size_t pool = 0; pool < kPools; ++pool) {
      for (auto* blocks : {&out.allocation, &out.active}) Add(now.blocks[pool], &(*blocks)[pool]);
      for (auto* bytes : {&out.allocated_bytes, &out.active_bytes}) Add(now.bytes[pool], &(*bytes)[pool]);
      Add(now.requested_bytes[pool], &out.requested_bytes[pool]);
    }
    for (Pool pool : {kAll, kLarge}) {
      Add(now.reserved_bytes, &out.reserved_bytes[pool]);
      Add(now.pages, &out.segment[pool]);
    }
    out.num_alloc_retries += now.retries;
    out.num_ooms += now.out_of_memory;
    out.num_sync_all_streams += now.synchronizations;
    out.num_device_alloc += now.pages.allocated;
    out.num_device_free += now.pages.freed;
    return out;
  }
  void resetAccumulatedStats(c10::DeviceIndex ordinal) override {
    if (Meter* meter = Opened(ordinal)) meter->ResetSums();
    if (CUDAAllocator* torchs = earlier_.torchs()) torchs->resetAccumulatedStats(ordinal);
  }
  void resetPeakStats(c10::DeviceIndex ordinal) override {
    if (Meter* meter = Opened(ordinal)) meter->ResetPeaks();
    if (CUDAAllocator* torchs = earlier_.torchs()) torchs->resetPeakStats(ordinal);
  }

  SnapshotInfo snapshot(c10::MempoolId_t pool, bool include_traces) override {
    TORCH_CHECK_NOT_IMPLEMENTED(pool.first == 0 && pool.second == 0,
                                "memmgr: the snapshot of one pool; memory_snapshot() shows all of them");
    SnapshotInfo out;
    if (CUDAAllocator* torchs = earlier_.torchs()) out.segments = torchs->snapshot(pool, false).segments;
    const int devices = std::max(device_count_.load(), 0);
    for (int ordinal = 0; ordinal < kMaxDevices; ++ordinal) {
      Meter* meter = Opened(ordinal);
      if (meter) AddSegments(*meter, static_cast<c10::DeviceIndex>(ordinal), &out.segments);
      if (ordinal < devices || meter) {
        out.device_traces.resize(static_cast<size_t>(ordinal) + 1);
        if (include_traces) out.device_traces.back() = history_.Entries(static_cast<c10::DeviceIndex>(ordinal));
      }
    }
    out.config_metadata = {};
    out.config_metadata.max_split_size = std::numeric_limits<size_t>::max();
    out.config_metadata.expandable_segments = true;
    return out;
  }

  bool isHistoryEnabled() override { return history_.recording(); }
  void recordHistory(bool enabled, CreateContextFn recorder, size_t most, RecordContext when, bool clear,
                     const std::vector<std::string>& skip) override {
    history_.Configure(enabled, recorder, most, when, clear, skip);
  }
  void attachAllocatorTraceTracker(AllocatorTraceTracker tracker) override { history_.Attach(std::move(tracker)); }
  void attachOutOfMemoryObserver(OutOfMemoryObserver observer) override {
    std::lock_guard hold(observers_lock_);
    observers_.push_back(std::move(observer));
  }

  // Functions that only some versions of torch have: none is marked `override`, and each is used where torch calls it.
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* p) { return history_.Origin(p); }
  // No request is rejected before it was tried.
  void attachOomRejectionObserver(std::function<void(int64_t, size_t, size_t, size_t)>) {}

  // ---- pools and graphs ----

  void beginAllocateToPool(c10::DeviceIndex ordinal, c10::MempoolId_t pool,
                           std::function<bool(cudaStream_t)>) override {
    TORCH_CHECK(mm_device_begin_pool(At(ordinal).device(), pool.first, pool.second) == 0,
                "memmgr: no more pools of memory can be kept apart");
    active_pools_++;
    AddUse(ordinal, pool, 1);
  }
  void endAllocateToPool(c10::DeviceIndex ordinal, c10::MempoolId_t pool) override {
    Meter* meter = Opened(ordinal);
    if (meter && mm_device_end_pool(meter->device(), pool.first, pool.second) == 0) active_pools_--;
  }
  // Uses of a pool that torch's own allocator has, too, are not told from ours: all end with the last one.
  void releasePool(c10::DeviceIndex ordinal, c10::MempoolId_t pool) override {
    int theirs = EarlierUses(ordinal, pool), ours = 0;
    {
      std::lock_guard hold(pools_lock_);
      const auto key = std::make_pair(ordinal, pool);
      if (const auto found = pools_.find(key); found != pools_.end()) ours = found->second;
      if (theirs > 0 && ours > 0) {
        if (++ended_uses_[key] < theirs + ours) return;
        ended_uses_.erase(key);
      } else {
        (ours > 0 ? ours : theirs) = 1;
      }
    }
    for (; theirs > 0; --theirs) earlier_.torchs()->releasePool(ordinal, pool);
    Meter* meter = Opened(ordinal);
    for (; ours > 0; --ours)
      if (meter && mm_device_release_pool(meter->device(), pool.first, pool.second) == 0) AddUse(ordinal, pool, -1);
  }
  void createOrIncrefPool(c10::DeviceIndex ordinal, c10::MempoolId_t pool,
                          std::shared_ptr<CUDAAllocator> allocator) override {
    TORCH_CHECK_NOT_IMPLEMENTED(!allocator,
                                "memmgr: a memory pool with an allocator of its own (torch.cuda.MemPool(...)); "
                                "MEMMGR_INSTALL=0 leaves torch's own allocator in place");
    beginAllocateToPool(ordinal, pool, nullptr);
    endAllocateToPool(ordinal, pool);
  }
  int getPoolUseCount(c10::DeviceIndex ordinal, c10::MempoolId_t pool) override {
    const int theirs = EarlierUses(ordinal, pool);
    std::lock_guard hold(pools_lock_);
    const auto key = std::make_pair(ordinal, pool);
    const auto ours = pools_.find(key), ended = ended_uses_.find(key);
    return theirs + (ours == pools_.end() ? 0 : ours->second) - (ended == ended_uses_.end() ? 0 : ended->second);
  }
  // Memory is one arena: out of memory, a pool's free blocks stay the pool's, and any block is split.
  void setUseOnOOM(c10::DeviceIndex, c10::MempoolId_t, bool) override {}
  void setNoSplit(c10::DeviceIndex, c10::MempoolId_t) override {}

  std::shared_ptr<AllocatorState> getCheckpointState(c10::DeviceIndex, c10::MempoolId_t) override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, kNoCheckpoints);
  }
  CheckpointDelta setCheckpointPoolState(c10::DeviceIndex, std::shared_ptr<AllocatorState>) override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, kNoCheckpoints);
  }

  // ---- other devices, other processes ----

  void enablePeerAccess(c10::DeviceIndex ordinal, c10::DeviceIndex other) override {
    const c10::cuda::CUDAGuard guard(ordinal);
    const cudaError_t enabled = cudaDeviceEnablePeerAccess(other, 0);
    if (enabled == cudaErrorPeerAccessAlreadyEnabled)
      (void)cudaGetLastError();
    else
      C10_CUDA_CHECK(enabled);
    if (memory_ == MM_MEMORY_PLAIN) return;
    const int error = mm_device_allow(At(other).device(), ordinal);
    TORCH_CHECK(error == 0, "memmgr: GPU ", static_cast<int>(ordinal), " cannot use the memory of GPU ",
                static_cast<int>(other), " (driver's error ", error, ")");
  }

  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, size_t bytes, cudaStream_t stream,
                          bool) override {
    if (to_device == from_device) return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
    return cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, stream);  // right for mapped memory in any case
  }

  ShareableHandle shareIpcHandle(void*) override { TORCH_CHECK_NOT_IMPLEMENTED(false, kNoSharing); }
  std::shared_ptr<void> getIpcDevPtr(std::string) override { TORCH_CHECK_NOT_IMPLEMENTED(false, kNoSharing); }

 private:
  static constexpr const char* kNoCheckpoints =
      "memmgr: checkpoints of a graph pool's state (torch.compile's mode=\"reduce-overhead\") are not supported; "
      "MEMMGR_INSTALL=0 leaves torch's own allocator in place";
  static constexpr const char* kNoSharing =
      "memmgr: CUDA tensors of this allocator cannot be sent to other processes; send host tensors, or set "
      "MEMMGR_INSTALL=0, which leaves torch's own allocator in place";

  static void Add(const Count& count, c10::CachingAllocator::Stat* out) {
    out->current += count.current;
    out->peak += count.peak;
    out->allocated += count.allocated;
    out->freed += count.freed;
  }

  static void TellProfiler(Meter& meter, c10::DeviceIndex device, void* p, bool allocated) {
    const auto block = static_cast<int64_t>(mm_arena_block_bytes(meter.arena(), p));
    const int64_t live = meter.live_bytes() - (allocated ? 0 : block);
    c10::reportMemoryUsageToProfiler(p, allocated ? block : -block, static_cast<size_t>(live),
                                     static_cast<size_t>(live), c10::Device(c10::DeviceType::CUDA, device));
  }

  void Handed(Meter& meter, c10::DeviceIndex device, void* p, size_t bytes, mm_stream stream, ContextRef context) {
    meter.Allocated(p, bytes);
    if (C10_UNLIKELY(history_.on()))
      history_.Note(TraceEntry::ALLOC, device, p, mm_arena_block_bytes(meter.arena(), p), stream, std::move(context));
    if (C10_UNLIKELY(c10::memoryProfilingEnabled())) TellProfiler(meter, device, p, true);
    if (const auto* trace = c10::impl::GPUTrace::get_trace(); C10_UNLIKELY(trace))
      (*trace)->trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<uintptr_t>(p));
  }

  // A sticky error: it looks like a lack of memory here, but is not.
  static void FailIfBroken(Meter& meter, c10::DeviceIndex ordinal) {
    char why[400] = "";
    const int error = mm_device_broken(meter.device(), why, sizeof why);
    TORCH_CHECK(error == 0, "CUDA error: ", why, ". GPU ", static_cast<int>(ordinal),
                " answers nothing else since then.");
  }

  [[noreturn]] void Fail(Meter& meter, c10::DeviceIndex ordinal, size_t bytes, mm_stream stream,
                         const mm_plugin_hooks* hooks, ContextRef context) {
    meter.Failed();
    uint64_t free_bytes = 0, total = 0;
    FailIfBroken(meter, ordinal);
    mm_device_memory(meter.device(), &free_bytes, &total);
    const uint64_t allowed = meter.allowed_bytes();
    if (history_.on())
      history_.Note(TraceEntry::OOM, ordinal, reinterpret_cast<void*>(free_bytes), bytes, stream, std::move(context));
    std::vector<OutOfMemoryObserver> observers;
    {
      std::lock_guard hold(observers_lock_);
      observers = observers_;
    }
    for (const auto& observer : observers) observer(ordinal, bytes, std::min(allowed, total), free_bytes);
    if (hooks) hooks->out_of_memory(bytes);
    const MemoryStats now = meter.Stats();
    std::string text = "CUDA out of memory. Tried to allocate " + Megabytes(bytes) + ". GPU " +
                       std::to_string(static_cast<int>(ordinal)) + " has a total capacity of " + Megabytes(total) +
                       " of which " + Megabytes(free_bytes) + " is free. memmgr's allocator holds " +
                       Megabytes(static_cast<uint64_t>(now.reserved_bytes.current)) + ", of which " +
                       Megabytes(static_cast<uint64_t>(now.bytes[kAll].current)) + " are tensors; no budget is open.";
    if (allowed != MM_UNLIMITED)
      text += " torch.cuda.set_per_process_memory_fraction allows " + Megabytes(allowed) + ".";
    TORCH_CHECK_WITH(OutOfMemoryError, false, text);
  }

  void AddSegments(const Meter& meter, c10::DeviceIndex ordinal, std::vector<SegmentInfo>* out) {
    for (const Segment& segment : meter.Segments()) {
      SegmentInfo info;
      info.device = ordinal;
      info.address = segment.address;
      info.total_size = segment.bytes;
      info.requested_size = segment.requested_bytes;
      info.allocated_size = info.active_size = segment.live_bytes;
      info.is_large = info.is_expandable = true;
      info.blocks.reserve(segment.pieces.size());
      for (const Piece& piece : segment.pieces) {
        BlockInfo block;
        block.size = piece.bytes;
        block.requested_size = piece.requested_bytes;
        block.allocated = block.active = piece.live;
        if (piece.live && history_.recording())
          block.context_when_allocated = history_.Origin(reinterpret_cast<void*>(piece.address));
        info.blocks.push_back(std::move(block));
      }
      out->push_back(std::move(info));
    }
  }

  // Returns the uses of a pool of torch's own allocator.
  int EarlierUses(c10::DeviceIndex ordinal, c10::MempoolId_t pool) {
    CUDAAllocator* torchs = earlier_.torchs();
    try {
      return torchs ? torchs->getPoolUseCount(ordinal, pool) : 0;
    } catch (const c10::Error&) {
      return 0;  // it has no such pool
    }
  }
  void AddUse(c10::DeviceIndex ordinal, c10::MempoolId_t pool, int uses) {
    std::lock_guard hold(pools_lock_);
    const auto key = std::make_pair(ordinal, pool);
    if ((pools_[key] += uses) <= 0) pools_.erase(key);
  }

  static constexpr uint64_t kWorthTrim = uint64_t{64} << 20;

  std::string driver_;
  int memory_ = MM_MEMORY_MAPPED;
  Earlier earlier_;
  std::atomic<bool> forked_{false};
  std::atomic<int> device_count_{-1};
  std::atomic<const mm_plugin_hooks*> hooks_{nullptr};
  std::mutex opening_;
  std::array<std::atomic<Meter*>, kMaxDevices> meters_{};
  History history_;
  std::mutex observers_lock_;
  std::vector<OutOfMemoryObserver> observers_;
  std::mutex pools_lock_;
  std::map<std::pair<c10::DeviceIndex, c10::MempoolId_t>, int> pools_, ended_uses_;
  std::atomic<int> active_pools_{0};
};

Allocator& Ours() {
  static auto* allocator = new Allocator;  // never destroyed: storages remember it
  return *allocator;
}

void Release(void* p) { Ours().GiveBack(p); }

void Say(const char* text, char* err, size_t err_len) {
  if (err && err_len) snprintf(err, err_len, "%s", text);
}

const mm_plugin kPlugin = {
    MM_PLUGIN_VERSION,
    0,
    [](int ordinal, char* err, size_t err_len) -> mm_device* {
      std::string wrong;
      Meter* meter = Ours().Open(ordinal, &wrong);
      if (!meter) Say(wrong.c_str(), err, err_len);
      return meter ? meter->device() : nullptr;
    },
    [](int ordinal, uint64_t bytes) {
      if (Meter* meter = Ours().Opened(ordinal)) meter->SetBudget(bytes);
    },
    [](const mm_plugin_hooks* hooks) { Ours().SetHooks(hooks); },
    [](int ordinal, size_t bytes, uint64_t keep_free, mm_stream home) {
      return Ours().Try(ordinal, bytes, keep_free, home);
    },
    &Release,
    [](const void* p) { return Ours().OwnerOf(p) ? 1 : 0; },
    [](int ordinal) {
      Meter* meter = Ours().Opened(ordinal);
      return meter ? mm_arena_resident(meter->arena()) : uint64_t{0};
    },
    [](int) { Ours().TrimEarlier(0); },  // the arena obeys at once
    [] { return Ours().EarlierDeleter(); },
};

}  // namespace
}  // namespace memmgr

// clang-format off
#include "native.cpp"
// clang-format on

#define MEMMGR_VISIBLE extern "C" __attribute__((visibility("default")))

// Puts the allocator in torch's place; -1 with a text: it cannot be. `driver` NULL: libcuda; `memory`: MM_MEMORY_*, of
// devices that are opened from now on. If torch's own allocator is in use its blocks stay its own.
MEMMGR_VISIBLE int mm_cuda_install(const char* driver, int memory, char* err, size_t err_len) {
  auto& current = c10::cuda::CUDACachingAllocator::allocator;
  auto* ours = &memmgr::Ours();
  memmgr::CUDAAllocator* const now = current.load();
  if (now == ours) return 0;
  const bool used = now && now->initialized();
  if (used && (now->name() != "native" || memmgr::TheNative().torchs)) {
    memmgr::Say("CUDA is initialised already, with another allocator", err, err_len);
    return -1;
  }
  ours->Use(driver, memory);
  static const bool once = [] {
    pthread_atfork(nullptr, nullptr, [] { memmgr::Ours().AfterForkInChild(); });
    return true;
  }();
  (void)once;
  if (used) ours->TakeOver(now);
  current.store(ours);
  c10::SetAllocator(c10::DeviceType::CUDA, ours, 255);
  return 0;
}

// Returns true if it is still installed. Until CUDA is initialised another library may replace it.
MEMMGR_VISIBLE int mm_cuda_in_place() {
  return c10::cuda::CUDACachingAllocator::allocator.load() == &memmgr::Ours() ? 1 : 0;
}

MEMMGR_VISIBLE const mm_plugin* mm_cuda_plugin() { return &memmgr::kPlugin; }

// Puts the door in front of torch's own allocator, whether CUDA is initialised or not: its table, or NULL with a text.
MEMMGR_VISIBLE const mm_plugin* mm_cuda_native(const char* driver, char* err, size_t err_len) {
  auto& current = c10::cuda::CUDACachingAllocator::allocator;
  auto& native = memmgr::TheNative();
  if (!native.torchs) {
    memmgr::CUDAAllocator* now = current.load();
    if (!now || now->name() != "native") {
      memmgr::Say("torch's CUDA allocator is another one", err, err_len);
      return nullptr;
    }
    static auto* door = new memmgr::Door;  // never destroyed: storages remember it
    native.torchs = now;
    native.Use(driver);
    current.store(door);
    c10::SetAllocator(c10::DeviceType::CUDA, door, 255);
  }
  return memmgr::NativePlugin();
}
