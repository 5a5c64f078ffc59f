// torch's own caching allocator under a budget, on request. Part of plugin.cpp's unit.
//
// The limit is torch's: its memory fraction, so its reserved memory never exceeds the budget. On every miss of its
// cache torch calls a FreeMemoryCallback before it grows, without the size of the request. The door adds it: it is
// installed in torch's place, hands every call on, and remembers its thread's request. Where growing would pass the
// limit the callback throws, so that torch's lock is free when the door calls the pager to evict, and then tries again.
//
// torch's trace trackers report allocations and frees, under its lock; the device's memory here (an arena that stays
// empty) keeps the sum and the streams that use a block (mm_device_lend).
#include <c10/cuda/CUDAAllocatorConfig.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>

namespace memmgr {
namespace {

class Native {
 public:
  struct Place {
    mm_device* memory = nullptr;
    std::atomic<uint64_t> reserved{0}, budget{MM_UNLIMITED}, told{0};
    std::atomic<double> users_fraction{1};  // the fraction that the program has set
    uint64_t total = 0;
  };
  // This thread's request to torch's allocator.
  struct Request {
    uint64_t bytes;
    bool may_grow;  // past the limit: torch then frees its cache, and fails
  };
  struct NoRoom {};

  CUDAAllocator* torchs = nullptr;
  std::atomic<const mm_plugin_hooks*> hooks{nullptr};

  Place* At(int ordinal) const {
    return ordinal >= 0 && ordinal < kMaxDevices ? places_[static_cast<size_t>(ordinal)].load() : nullptr;
  }
  const mm_plugin_hooks* HooksOf(int ordinal) const {
    const mm_plugin_hooks* now = hooks.load(std::memory_order_acquire);
    return now && now->ordinal == ordinal ? now : nullptr;
  }

  void Use(const char* driver) { driver_ = driver ? driver : ""; }

  Place* Open(int ordinal, std::string* wrong) {
    std::lock_guard hold(opening_);
    Place* place = At(ordinal);
    if (!place) {
      char text[256] = "";
      const mm_driver* driver = mm_driver_load(driver_.empty() ? nullptr : driver_.c_str(), text, sizeof text);
      mm_device* memory =
          driver ? mm_device_open(driver, ordinal, MM_UNLIMITED, MM_MEMORY_MAPPED, text, sizeof text) : nullptr;
      *wrong = text;
      if (!memory) return nullptr;
      place = new Place;  // lives as long as the process: its tensors may
      place->memory = memory;
      uint64_t free_now = 0;
      mm_device_memory(memory, &free_now, &place->total);
      place->total = std::max(place->total, RuntimeTotal(ordinal));  // of one of them torch's fraction is a share
      places_[static_cast<size_t>(ordinal)] = place;
      if (!attached_) torchs->attachAllocatorTraceTracker([this](const TraceEntry& entry) { Told(entry); });
      attached_ = true;
    }
    Count(*place, ordinal);
    return place;
  }

  // The lower of the budget and the program's own limit.
  uint64_t Limit(const Place& place) const {
    const uint64_t budget = place.budget.load(std::memory_order_relaxed);
    return std::min(budget, static_cast<uint64_t>(place.users_fraction * static_cast<double>(place.total)));
  }

  void SetBudget(int ordinal, uint64_t bytes) {
    Place* place = At(ordinal);
    if (!place) return;
    const bool opens = place->budget.exchange(bytes) == MM_UNLIMITED;
    if (opens && bytes != MM_UNLIMITED) place->users_fraction = torchs->getMemoryFraction(ordinal_of(ordinal));
    mm_arena_set_budget(mm_device_arena(place->memory), bytes);
    Obey(ordinal, *place);
  }

  void SetFraction(double fraction, int ordinal) {
    Place* place = At(ordinal);
    if (!place || place->budget.load() == MM_UNLIMITED) return torchs->setMemoryFraction(fraction, ordinal_of(ordinal));
    TORCH_CHECK(0 <= fraction && fraction <= 1, "invalid fraction:", fraction, ". Please set within [0, 1].");
    place->users_fraction = fraction;
    Obey(ordinal, *place);
  }
  double Fraction(int ordinal) const {
    const Place* place = At(ordinal);
    return place && place->budget.load() != MM_UNLIMITED ? place->users_fraction.load()
                                                         : torchs->getMemoryFraction(ordinal_of(ordinal));
  }

  // Cached memory past the limit goes back to the device.
  void Trim(int ordinal) {
    Place* place = At(ordinal);
    if (place && place->reserved.load() > Limit(*place)) torchs->emptyCache({0, 0});
  }

  // ---- allocate ----

  template <typename F>
  auto Ask(uint64_t bytes, bool may_grow, F f) {
    const Request request{bytes, may_grow};
    struct Restore {
      const Request* outer = tl_request;
      ~Restore() { tl_request = outer; }
    } restore;
    tl_request = &request;
    return f();
  }

  // `f` allocates with torch's allocator. The pager is called without its lock. If the free memory has no run that
  // fits, torch frees its cache and grows anew, which waits for the device.
  template <typename F>
  auto Take(uint64_t bytes, F f) -> decltype(f()) {
    const c10::DeviceIndex ordinal = CurrentDevice();
    const mm_plugin_hooks* asked = HooksOf(ordinal);
    if (!asked || bytes == 0) return f();
    if (tl_asking) return Ask(bytes, true, f);
    for (bool may_grow = false, more = true, looked = false;;) {
      uint64_t wanted = bytes > kSmall ? bytes : Segment(bytes);  // small blocks have segments of their own
      try {
        auto taken = Ask(bytes, may_grow, f);
        asked->taken(bytes);
        return taken;
      } catch (const NoRoom&) {
        if (looked) {
          looked = false;
          may_grow = true;
          continue;
        }
      } catch (const c10::OutOfMemoryError&) {
        if (!more) asked->out_of_memory(bytes);
        wanted = Segment(bytes);
      }
      looked = true;
      more = !Capturing(ordinal) && MakeRoom(*asked, wanted) > 0;
      may_grow = !more;
    }
  }

  void* Try(int ordinal, size_t bytes, uint64_t keep_free, mm_stream home) {
    Place* place = At(ordinal);
    if (!place) return nullptr;
    const uint64_t limit = Limit(*place), live = mm_arena_resident(mm_device_arena(place->memory));
    if (live > limit || limit - live < keep_free + bytes) return nullptr;
    try {
      const c10::cuda::CUDAGuard here(ordinal_of(ordinal));
      return Ask(bytes, false, [&] { return torchs->raw_alloc_with_stream(bytes, static_cast<cudaStream_t>(home)); });
    } catch (const NoRoom&) {
    } catch (const c10::Error&) {  // a device that fails: the op that needs the bytes raises it
    }
    return nullptr;
  }

  // FreeMemoryCallback: torch's cache has no block that fits. True: memory was freed, look again.
  bool Missed() {
    const c10::DeviceIndex ordinal = CurrentDevice();
    const Place* place = At(ordinal);
    const mm_plugin_hooks* asked = HooksOf(ordinal);
    if (!place || !asked) return false;
    const uint64_t limit = Limit(*place), reserved = place->reserved.load();
    const uint64_t room = limit - std::min(limit, reserved);
    const Request* request = tl_request;
    if (request) {
      if (request->may_grow || room >= Segment(request->bytes)) return false;
      throw NoRoom();
    }
    // A request came past the door, without its size. The lock is torch's, so this runs once.
    const uint64_t share = limit / 8;
    if (room >= share || tl_asking || Capturing(ordinal)) return false;
    return MakeRoom(*asked, share - room) > 0;
  }

 private:
  static constexpr uint64_t kMiB = 1 << 20, kSmall = kMiB;  // up to here torch takes a block from its small pool

  static uint64_t MakeRoom(const mm_plugin_hooks& asked, uint64_t bytes) {
    tl_asking = true;
    const uint64_t released = asked.make_room(bytes);
    tl_asking = false;
    return released;
  }

  static c10::DeviceIndex ordinal_of(int ordinal) { return static_cast<c10::DeviceIndex>(ordinal); }

  // By how much torch grows for a request of this size (c10/cuda/CUDACachingAllocator.cpp, get_allocation_size), at
  // least: its expandable segments grow by less.
  static uint64_t Segment(uint64_t bytes) {
    if (c10::CachingAllocator::AcceleratorAllocatorConfig::use_expandable_segments()) return bytes;
    if (bytes <= kSmall) return 2 * kMiB;
    return bytes < 10 * kMiB ? 20 * kMiB : (bytes + 2 * kMiB - 1) / (2 * kMiB) * (2 * kMiB);
  }

  bool Capturing(c10::DeviceIndex ordinal) const {
    const Place* place = At(ordinal);
    return place && mm_device_is_capturing(place->memory, c10::cuda::getCurrentCUDAStream(ordinal).stream()) > 0;
  }

  void Obey(int ordinal, const Place& place) {
    const uint64_t limit = Limit(place);
    const double total = static_cast<double>(std::max<uint64_t>(place.total, 1));
    torchs->setMemoryFraction(limit >= place.total ? place.users_fraction.load() : static_cast<double>(limit) / total,
                              ordinal_of(ordinal));
  }

  // Everything that torch has handed out. Other threads allocate at the same time, so the look is repeated until
  // nothing has changed during it.
  void Count(Place& place, int ordinal) {
    for (uint64_t before = ~uint64_t{0}; before != place.told.load();) {
      before = place.told.load();
      mm_device_forget_lent(place.memory);
      uint64_t reserved = 0;
      for (const SegmentInfo& segment : torchs->snapshot({0, 0}, false).segments) {
        if (segment.device != ordinal) continue;
        reserved += segment.total_size;
        size_t at = segment.address;
        for (const BlockInfo& block : segment.blocks) {
          if (block.allocated)
            mm_device_lend(place.memory, reinterpret_cast<void*>(at), block.requested_size, segment.stream);
          at += block.size;
        }
      }
      place.reserved = reserved;
    }
  }

  void Told(const TraceEntry& entry) {
    Place* place = At(entry.device_);
    if (!place) return;
    const auto* p = reinterpret_cast<const void*>(entry.addr_);
    const auto bytes = static_cast<uint64_t>(entry.size_);
    if (entry.action_ <= TraceEntry::SEGMENT_UNMAP) ++place->told;
    switch (entry.action_) {
      case TraceEntry::ALLOC:
        mm_device_lend(place->memory, p, bytes, entry.stream_);
        break;
      case TraceEntry::FREE_REQUESTED:
        if (const mm_plugin_hooks* now = HooksOf(entry.device_)) now->freed(bytes);
        mm_device_lent_ends(place->memory, p);
        break;
      case TraceEntry::SEGMENT_ALLOC:
      case TraceEntry::SEGMENT_MAP:
        place->reserved += bytes;
        break;
      case TraceEntry::SEGMENT_FREE:
      case TraceEntry::SEGMENT_UNMAP:
        place->reserved -= bytes;
        break;
      default:
        break;
    }
  }

  static thread_local const Request* tl_request;
  static thread_local bool tl_asking;

  std::string driver_;
  std::mutex opening_;
  bool attached_ = false;
  std::array<std::atomic<Place*>, kMaxDevices> places_{};
};

thread_local const Native::Request* Native::tl_request = nullptr;
thread_local bool Native::tl_asking = false;

Native& TheNative() {
  static auto* native = new Native;  // never destroyed: storages remember the door
  return *native;
}

struct OnMiss final : c10::FreeMemoryCallback {
  bool Execute() override { return TheNative().Missed(); }
};

}  // namespace
}  // namespace memmgr

namespace c10 {
REGISTER_FREE_MEMORY_CALLBACK("memmgr", memmgr::OnMiss)
}

namespace memmgr {
namespace {

#define HAND_ON(result, name, parameters, arguments) \
  result name parameters override { return torchs().name arguments; }

class Door final : public CUDAAllocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    return TheNative().Take(n, [&] { return torchs().allocate(n); });
  }
  void* raw_alloc(size_t n) override {
    return TheNative().Take(n, [&] { return torchs().raw_alloc(n); });
  }
  void* raw_alloc_with_stream(size_t n, cudaStream_t stream) override {
    return TheNative().Take(n, [&] { return torchs().raw_alloc_with_stream(n, stream); });
  }
  c10::DeleterFnPtr raw_deleter() const override { return torchs().raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t n) const override { torchs().copy_data(to, from, n); }
  double getMemoryFraction(c10::DeviceIndex device) override { return TheNative().Fraction(device); }
  void setMemoryFraction(double fraction, c10::DeviceIndex device) override {
    TheNative().SetFraction(fraction, device);
  }
  // cudnn chooses kernels by the workspace that it could have: a tight budget must not change the choice.
  void cacheInfo(c10::DeviceIndex device, size_t* largest) override {
    const Native::Place* place = TheNative().At(device);
    if (!place) return torchs().cacheInfo(device, largest);
    *largest = place->total;
  }

  bool is_simple_data_ptr(const c10::DataPtr& p) const override { return torchs().is_simple_data_ptr(p); }
  bool initialized() override { return torchs().initialized(); }
  HAND_ON(void, raw_delete, (void* p), (p))
  HAND_ON(void, init, (int count), (count))
  HAND_ON(void, enable, (bool on), (on))
  bool isEnabled() const override { return torchs().isEnabled(); }
  HAND_ON(std::string, name, (), ())
  HAND_ON(void, emptyCache, (c10::MempoolId_t pool), (pool))
  HAND_ON(std::vector<StreamSegmentSize>, getExpandableSegmentSizes, (c10::DeviceIndex d), (d))
  HAND_ON(void*, getBaseAllocation, (void* p, size_t* bytes), (p, bytes))
  using CUDAAllocator::recordStream;
  HAND_ON(void, recordStream, (const c10::DataPtr& p, CUDAStream stream), (p, stream))
  HAND_ON(DeviceStats, getDeviceStats, (c10::DeviceIndex d), (d))
  HAND_ON(void, resetAccumulatedStats, (c10::DeviceIndex d), (d))
  HAND_ON(void, resetPeakStats, (c10::DeviceIndex d), (d))
  HAND_ON(SnapshotInfo, snapshot, (c10::MempoolId_t pool, bool traces), (pool, traces))
  HAND_ON(void, beginAllocateToPool, (c10::DeviceIndex d, c10::MempoolId_t p, std::function<bool(cudaStream_t)> f),
          (d, p, std::move(f)))
  HAND_ON(void, endAllocateToPool, (c10::DeviceIndex d, c10::MempoolId_t p), (d, p))
  HAND_ON(void, releasePool, (c10::DeviceIndex d, c10::MempoolId_t p), (d, p))
  HAND_ON(int, getPoolUseCount, (c10::DeviceIndex d, c10::MempoolId_t p), (d, p))
  HAND_ON(void, createOrIncrefPool, (c10::DeviceIndex d, c10::MempoolId_t p, std::shared_ptr<CUDAAllocator> a),
          (d, p, std::move(a)))
  HAND_ON(void, setUseOnOOM, (c10::DeviceIndex d, c10::MempoolId_t p, bool on), (d, p, on))
  HAND_ON(void, setNoSplit, (c10::DeviceIndex d, c10::MempoolId_t p), (d, p))
  HAND_ON(bool, checkPoolLiveAllocations,
          (c10::DeviceIndex d, c10::MempoolId_t p, const std::unordered_set<void*>& live), (d, p, live))
  HAND_ON(ShareableHandle, shareIpcHandle, (void* p), (p))
  HAND_ON(std::shared_ptr<void>, getIpcDevPtr, (std::string handle), (std::move(handle)))
  HAND_ON(bool, isHistoryEnabled, (), ())
  HAND_ON(void, recordHistory,
          (bool on, CreateContextFn recorder, size_t most, RecordContext when, bool clear,
           const std::vector<std::string>& skip),
          (on, recorder, most, when, clear, skip))
  using Notes = std::vector<std::pair<std::string, std::string>>;
  HAND_ON(void, recordAnnotation, (const Notes& notes), (notes))
  HAND_ON(void, pushCompileContext, (std::string & text), (text))
  HAND_ON(void, popCompileContext, (), ())
  HAND_ON(void, setUserMetadata, (const std::string& text), (text))
  HAND_ON(std::string, getUserMetadata, (), ())
  HAND_ON(void, attachOutOfMemoryObserver, (OutOfMemoryObserver o), (std::move(o)))
  HAND_ON(void, attachAllocatorTraceTracker, (AllocatorTraceTracker t), (std::move(t)))
  HAND_ON(void, enablePeerAccess, (c10::DeviceIndex d, c10::DeviceIndex other), (d, other))
  HAND_ON(cudaError_t, memcpyAsync, (void* to, int td, const void* from, int fd, size_t n, cudaStream_t s, bool p2p),
          (to, td, from, fd, n, s, p2p))
  HAND_ON(std::shared_ptr<AllocatorState>, getCheckpointState, (c10::DeviceIndex d, c10::MempoolId_t p), (d, p))
  HAND_ON(CheckpointDelta, setCheckpointPoolState, (c10::DeviceIndex d, std::shared_ptr<AllocatorState> s),
          (d, std::move(s)))
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 12
  HAND_ON(std::shared_ptr<c10::GatheredContext>, getContextForPointer, (const void* p), (p))
  HAND_ON(void, attachOomRejectionObserver, (OomRejectionObserver o), (std::move(o)))
#endif
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  HAND_ON(void, markCaptureBegin, (c10::DeviceIndex d), (d))
  HAND_ON(void, markCaptureEnd, (c10::DeviceIndex d), (d))
  HAND_ON(c10::DataPtr, allocateWithAddress, (size_t n, void* at), (n, at))
#endif
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
  HAND_ON(bool, supportsUserMetadata, (), ())
  HAND_ON(void, annotateMemory, (const void* p, const std::string& text), (p, text))
#endif

 private:
  static CUDAAllocator& torchs() { return *TheNative().torchs; }
};
#undef HAND_ON

const mm_plugin* NativePlugin() {
  static const mm_plugin plugin = {
      MM_PLUGIN_VERSION,
      1,
      [](int ordinal, char* err, size_t err_len) -> mm_device* {
        std::string wrong;
        Native::Place* place = TheNative().Open(ordinal, &wrong);
        if (!place) Say(wrong.c_str(), err, err_len);
        return place ? place->memory : nullptr;
      },
      [](int ordinal, uint64_t bytes) { TheNative().SetBudget(ordinal, bytes); },
      [](const mm_plugin_hooks* hooks) { TheNative().hooks = hooks; },
      [](int ordinal, size_t bytes, uint64_t keep_free, mm_stream home) {
        return TheNative().Try(ordinal, bytes, keep_free, home);
      },
      TheNative().torchs->raw_deleter(),
      [](const void*) { return 0; },
      [](int ordinal) {
        const Native::Place* place = TheNative().At(ordinal);
        return place ? mm_arena_resident(mm_device_arena(place->memory)) : uint64_t{0};
      },
      [](int ordinal) { TheNative().Trim(ordinal); },
      []() -> c10::DeleterFnPtr { return nullptr; },
  };
  return &plugin;
}

}  // namespace
}  // namespace memmgr
