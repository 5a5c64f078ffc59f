// torch.cuda.memory._record_memory_history: a ring of allocations and frees, and the stacks that allocated live blocks.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace memmgr {

using c10::CachingDeviceAllocator::AllocatorTraceTracker;
using c10::CachingDeviceAllocator::CreateContextFn;
using c10::CachingDeviceAllocator::RecordContext;
using c10::CachingDeviceAllocator::TraceEntry;
using ContextRef = std::shared_ptr<c10::GatheredContext>;

class History {
 public:
  // One atomic read, so that recording costs nothing while it is off.
  bool on() const { return on_.load(std::memory_order_relaxed); }
  bool recording() const { return recording_.load(std::memory_order_relaxed); }

  void Configure(bool enabled, CreateContextFn recorder, size_t most, RecordContext when, bool clear,
                 const std::vector<std::string>& skip) {
    std::lock_guard hold(lock_);
    TORCH_CHECK(when == RecordContext::NEVER || recorder, "memmgr: recording stacks needs a recorder");
    recorder_ = recorder;
    most_ = std::max<size_t>(1, most);
    when_ = enabled ? when : RecordContext::NEVER;
    skip_.clear();
    for (const std::string& action : skip) skip_.insert(c10::CachingDeviceAllocator::parseTraceEntryAction(action));
    if (clear) entries_.clear();
    if (!enabled) origins_.clear();
    recording_ = enabled;
    on_ = enabled || !trackers_.empty();
  }

  void Attach(AllocatorTraceTracker tracker) {
    std::lock_guard hold(lock_);
    trackers_.push_back(std::move(tracker));
    on_ = true;
  }

  // Python's stack, which takes the GIL: without a lock, and before any of the allocator's.
  ContextRef Gather(RecordContext level) {
    const CreateContextFn recorder = recorder_.load();
    return recorder && when_.load() >= level ? recorder() : nullptr;
  }

  void Note(TraceEntry::Action action, c10::DeviceIndex device, const void* p, size_t bytes, void* stream,
            ContextRef context) {
    TraceEntry entry(action, device, reinterpret_cast<size_t>(p), bytes, stream, c10::MempoolId_t{0, 0},
                     c10::getApproximateTime(), when_.load() >= RecordContext::ALLOC ? context : nullptr);
    std::vector<AllocatorTraceTracker> trackers;
    {
      std::lock_guard hold(lock_);
      if (recording_ && skip_.count(action) == 0) {
        entries_.push_back(entry);
        while (entries_.size() > most_) entries_.pop_front();
      }
      if (recording_ && context && action == TraceEntry::ALLOC) origins_[p] = std::move(context);
      if (action == TraceEntry::FREE_COMPLETED) origins_.erase(p);
      trackers = trackers_;
    }
    for (const AllocatorTraceTracker& tracker : trackers) tracker(entry);
  }

  ContextRef Origin(const void* p) {
    std::lock_guard hold(lock_);
    const auto found = origins_.find(p);
    return found != origins_.end() ? found->second : nullptr;
  }

  // Entries of one device, oldest first, at the times of the wall clock.
  std::vector<TraceEntry> Entries(c10::DeviceIndex device) {
    std::vector<TraceEntry> out;
    {
      std::lock_guard hold(lock_);
      for (const TraceEntry& entry : entries_)
        if (entry.device_ == device) out.push_back(entry);
    }
    if (out.empty()) return out;
    const auto nanoseconds = clock_.makeConverter();
    for (TraceEntry& entry : out) entry.time_.t_ = nanoseconds(entry.time_.approx_t_) / 1000;
    return out;
  }

 private:
  std::mutex lock_;  // a leaf; contexts may end under it, as under torch's own
  std::atomic<bool> on_{false}, recording_{false};
  std::atomic<CreateContextFn> recorder_{nullptr};
  std::atomic<RecordContext> when_{RecordContext::NEVER};
  size_t most_ = 1;
  std::unordered_set<int> skip_;
  std::deque<TraceEntry> entries_;
  std::unordered_map<const void*, ContextRef> origins_;
  std::vector<AllocatorTraceTracker> trackers_;
  c10::ApproximateClockToUnixTimeConverter clock_;
};

}  // namespace memmgr
