// memdev's own allocator, in use until another is installed with c10::SetAllocator(kPrivateUse1, ...): the plainest one
// that is right in stream order. A freed block is reused only on the stream that it was allocated on, at once there.
#pragma once

#include <c10/core/Allocator.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <set>
#include <tuple>

#include "driver.h"

namespace memdev {

// A pattern that is NaN in every floating type, and -1 (out of range for an index) in the signed integers.
constexpr int kPoison = 0xFF;
inline std::atomic<bool> poison{true};

struct Fill : Work {
  Fill(void* to, size_t bytes) : to(to), bytes(bytes) {}
  void Run() override { std::memset(to, kPoison, bytes); }
  std::string Name() const override { return "poison"; }
  bool IsHollow() const override { return hollow.load(); }
  void* to;
  size_t bytes;
};

struct RawCopy : Work {
  RawCopy(void* to, const void* from, size_t bytes) : to(to), from(from), bytes(bytes) {}
  void Run() override { std::memmove(to, from, bytes); }
  std::string Name() const override { return "raw copy"; }
  int Engine() const override { return kCompute; }
  uint64_t Bytes() const override { return 2 * bytes; }
  bool IsHollow() const override { return hollow.load(); }
  void* to;
  const void* from;
  size_t bytes;
};

inline void Poison(int device, CUstream stream, void* p, size_t bytes) {
  if (poison.load() && p != nullptr && bytes > 0) Launch(device, stream, std::make_unique<Fill>(p, bytes));
}

struct Block {
  void* p;
  size_t bytes;
  int device;
  CUstream home;
  std::set<std::pair<int, CUstream>> users;  // other streams with queued work on it
  bool captured = false;                     // made for a graph, which uses it whenever it is replayed
};

class Memory : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    int device = thread_state.device;
    c10::Device where(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device));
    if (n == 0) return c10::DataPtr(nullptr, where);
    CUstream stream = CurrentStream(device);
    size_t bytes = (n + 511) / 512 * 512;
    // A graph's block is used by no other work, and not twice by the graph.
    bool captured = IsCapturing(device, stream);
    void* p = captured ? nullptr : Reuse(device, stream, bytes);
    if (p == nullptr) p = Obtain(device, bytes);
    if (p == nullptr && !captured) {
      EmptyCache();
      p = Obtain(device, bytes);
    }
    TORCH_CHECK_WITH(OutOfMemoryError, p != nullptr, "memdev: out of memory: tried to allocate ", n, " bytes");
    std::lock_guard<std::mutex> lock(mutex_);
    Block* block = live_[p] = new Block{p, bytes, device, stream, {}, captured};
    return c10::DataPtr(p, block, &Memory::Free, where);
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    int device = thread_state.device;
    Launch(device, CurrentStream(device), std::make_unique<RawCopy>(to, from, bytes));
    SynchronizeStream(device, CurrentStream(device));
  }

  // Work on `stream` uses the block that begins at p, now or up to its end.
  void Used(void* p, int device, CUstream stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(p);
    if (found == live_.end()) return;
    Block& block = *found->second;
    if (device != block.device || stream != block.home) block.users.insert({device, stream});
  }

  // Waits for the devices and frees the cached blocks.
  void EmptyCache() {
    for (int i = 0; i < driver.devices; ++i) {
      UseDevice(i);
      MEMDEV_CHECK(driver.cuCtxSynchronize());
    }
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [key, blocks] : free_) {
      UseDevice(std::get<0>(key));
      for (void* p : blocks) MEMDEV_CHECK(driver.cuMemFree(reinterpret_cast<unsigned long long>(p)));
    }
    free_.clear();
  }

 private:
  using Key = std::tuple<int, CUstream, size_t>;

  static void Free(void* raw);

  void* Obtain(int device, size_t bytes) {
    unsigned long long p = 0;
    UseDevice(device);
    std::lock_guard<std::mutex> lock(mutex_);
    int mode = 2;  // relaxed: a capture would forbid it
    MEMDEV_CHECK(driver.cuExchangeCaptureMode(&mode));
    int error = driver.cuMemAlloc(&p, bytes);
    MEMDEV_CHECK(driver.cuExchangeCaptureMode(&mode));
    return error == 0 ? reinterpret_cast<void*>(p) : nullptr;
  }

  void* Reuse(int device, CUstream stream, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = free_.find({device, stream, bytes});
    if (found == free_.end() || found->second.empty()) return nullptr;
    void* p = found->second.back();  // the last one freed, so that a missing wait shows soonest
    found->second.pop_back();
    return p;
  }

  std::mutex mutex_;
  std::map<void*, Block*> live_;
  std::map<Key, std::vector<void*>> free_;
};

inline Memory& memory = *new Memory;

inline void Memory::Free(void* raw) {
  std::unique_ptr<Block> block(static_cast<Block*>(raw));
  if (closing.load()) return;
  {
    std::lock_guard<std::mutex> lock(memory.mutex_);
    memory.live_.erase(block->p);
  }
  if (block->captured) return;  // a graph's memory is its own as long as the process lives
  bool capturing = IsCapturing(block->device, block->home);
  for (const auto& [device, stream] : block->users) capturing = capturing || IsCapturing(device, stream);
  if (capturing && !block->users.empty()) return;  // no work can be waited for: torch puts it off, here it is lost
  for (const auto& [device, stream] : block->users) StreamWaits(block->device, block->home, device, stream);
  Poison(block->device, block->home, block->p, block->bytes);
  std::lock_guard<std::mutex> lock(memory.mutex_);
  memory.free_[{block->device, block->home, block->bytes}].push_back(block->p);
}

// Page-locked host memory. A copy keeps its memory alive, so a block can be freed at once.
class PinnedMemory : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return c10::DataPtr(nullptr, c10::kCPU);
    void* p = nullptr;
    UseDevice(thread_state.device);
    MEMDEV_CHECK(driver.cuMemHostAlloc(&p, n, 0));
    std::lock_guard<std::mutex> lock(mutex_);
    ranges_[static_cast<char*>(p)] = n;
    return c10::DataPtr(p, p, &PinnedMemory::Free, c10::kCPU);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &PinnedMemory::Free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

  bool Contains(const void* p) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto above = ranges_.upper_bound(static_cast<char*>(const_cast<void*>(p)));
    if (above == ranges_.begin()) return false;
    --above;
    return static_cast<const char*>(p) < above->first + above->second;
  }

 private:
  static void Free(void* p);
  std::mutex mutex_;
  std::map<char*, size_t> ranges_;
};

inline PinnedMemory& pinned_memory = *new PinnedMemory;

inline void PinnedMemory::Free(void* p) {
  {
    std::lock_guard<std::mutex> lock(pinned_memory.mutex_);
    pinned_memory.ranges_.erase(static_cast<char*>(p));
  }
  if (!closing.load()) driver.cuMemFreeHost(p);
}

}  // namespace memdev
