// Device: its life, streams, blocks, copies and pools. device_marks.cpp has its waits for work.
#include "device.h"

#include <errno.h>

#include <algorithm>
#include <bit>
#include <mutex>
#include <new>
#include <utility>

#include "ordering.h"

namespace memmgr {
namespace {

constexpr int kMaxStreams = 65535;
constexpr uint64_t kMiB = uint64_t{1} << 20;
// CUDA promises 256 bytes for any address that it hands out, torch's own allocator 512: cuBLAS looks at the alignment
// when it chooses a kernel, and a workspace that is not at 256 is an error.
constexpr int kBlockShift = 9;
constexpr size_t kSpareEvents = 32;  // for reuse

uint64_t NextSerial() {
  static std::atomic<uint64_t> serial{0};
  return ++serial;
}

// One stream does nearly all work of a thread.
struct LastStream {
  uint64_t serial = 0;
  CUstream stream = nullptr;
  int number = 0;
};
thread_local LastStream last_stream;

}  // namespace

// ---- life ------------------------------------------------------------------------------------------------------

Device::Device(const mm_driver& driver, int ordinal)
    : driver_(driver),
      ordinal_(ordinal),
      serial_(NextSerial()),
      pages_(driver, ordinal, this),
      kernels_(driver, ordinal) {
  WatchForks();
}

Device::~Device() {
  IgnoreForks();
  arena_.reset();
  const memmgr::EnsureContext context(driver_, ordinal_);
  for (const Marks& marks : marks_)
    for (const Marks::One& mark : marks.pending)
      if (!marks.copies) events_.push_back(mark.event);
  for (CUevent event : events_) driver_.EventDestroy(event);
  for (CUstream stream : made_) driver_.StreamDestroy(stream);
}

Device* Device::Open(const mm_driver& driver, int ordinal, uint64_t budget_bytes, int memory, std::string* wrong) {
  std::unique_ptr<Device, void (*)(Device*)> device(new Device(driver, ordinal), [](Device* made) { delete made; });
  return device->OpenArena(budget_bytes, memory, wrong) ? device.release() : nullptr;
}

bool Device::OpenArena(uint64_t budget_bytes, int memory, std::string* wrong) {
  size_t free_bytes = 0, total_bytes = 0;
  CUresult error = Memory(&free_bytes, &total_bytes);
  if (error == CUDA_SUCCESS) error = memory == MM_MEMORY_PLAIN ? pages_.UsePlain() : pages_.UseMapped();
  if (error != CUDA_SUCCESS) {
    *wrong = "device " + std::to_string(ordinal_) + ": " + DriverText(driver_, error);
    return false;
  }
  const uint64_t page = pages_.ops().page_bytes;
  Areas areas{.small_unit_shift = kBlockShift};
  if (memory == MM_MEMORY_PLAIN) {
    uint64_t length = budget_bytes;
    if (budget_bytes == MM_UNLIMITED) {  // room for other uses: contexts, libraries, fragmentation of the driver's
      const uint64_t margin = std::max(256 * kMiB, free_bytes / uint64_t{16});
      length = free_bytes - std::min<uint64_t>(margin, free_bytes / 2);
    }
    length = std::max(length / page, uint64_t{2}) * page;
    areas.small_bytes = std::max(length / 64 / page, uint64_t{1}) * page;  // it is taken from the budget here
    areas.large_bytes = areas.least_large_bytes = length - areas.small_bytes;
  } else {
    const uint64_t budget = budget_bytes == MM_UNLIMITED ? total_bytes : budget_bytes;
    areas.least_large_bytes = std::max<uint64_t>(budget, page);
    areas.large_bytes = std::max(4 * static_cast<uint64_t>(total_bytes), 2 * std::min(budget, uint64_t{1} << 44));
    areas.shared_bytes = areas.large_bytes;
    areas.most_small = std::max(areas.most_small, page / 16);
  }
  arena_.reset(Arena::Create(pages_.ops(), budget_bytes, areas, wrong));
  if (arena_ == nullptr) return false;
  // It owns its memory as one piece: contiguity has to be made by evicting neighbours.
  if (memory == MM_MEMORY_PLAIN) arena_->SetLayout(MM_REMAP_NEVER);
  return true;
}

int Device::Close(Device* device) {
  if (device->forked() || !device->arena_->Idle()) return -1;
  {
    const auto context = device->EnsureContext();
    const int error = Order<"close.all">([&] { return device->SynchronizeContext(); });
    if (error == -EBUSY) return -1;
  }
  delete device;
  return 0;
}

void Device::AfterForkInChild() {
  forked_.store(true, std::memory_order_relaxed);
  for (Lock* lock : {&streams_lock_, &events_lock_, &lent_lock_, &settling_, &pools_lock_, &marks_lock_}) lock->Renew();
  kernels_.AfterForkInChild();
}

CUresult Device::Memory(size_t* free_bytes, size_t* total_bytes) const {
  const auto context = EnsureContext();
  return context.error() != CUDA_SUCCESS ? context.error() : driver_.MemGetInfo(free_bytes, total_bytes);
}

// ---- streams ---------------------------------------------------------------------------------------------------

int Device::Number(CUstream stream) {
  if (last_stream.serial == serial_ && last_stream.stream == stream) return last_stream.number;
  std::lock_guard hold(streams_lock_);
  const auto known = numbers_.find(stream);
  int number = static_cast<int>(streams_.size());
  if (known != numbers_.end()) {
    number = known->second;
  } else {
    if (number == kMaxStreams) return -1;
    if (streams_.size() == streams_.capacity()) streams_.reserve(2 * streams_.size() + 8);
    numbers_.emplace(stream, static_cast<uint16_t>(number));
    streams_.push_back(stream);
  }
  last_stream = {serial_, stream, number};
  return number;
}

std::vector<CUstream> Device::StreamsOf(StreamMask touched, CUstream but) {
  std::vector<CUstream> streams;
  std::lock_guard hold(streams_lock_);
  for (StreamMask rest = touched & ~kAnything & ~(StreamMask{1} << kSharedBit); rest != 0; rest &= rest - 1) {
    const auto number = static_cast<size_t>(std::countr_zero(rest));
    if (number < streams_.size()) streams.push_back(streams_[number]);
  }
  if ((touched >> kSharedBit & 1) != 0)
    for (size_t number = kSharedBit; number < streams_.size(); ++number) streams.push_back(streams_[number]);
  std::erase(streams, but);
  return streams;
}

CUstream Device::MakeStream(CUresult* error) {
  {
    std::lock_guard hold(streams_lock_);
    if (!given_.empty()) {
      CUstream stream = given_.back();
      given_.pop_back();
      *error = CUDA_SUCCESS;
      return stream;
    }
  }
  const auto context = EnsureContext();
  CUstream stream = nullptr;
  *error = context.error();
  if (*error == CUDA_SUCCESS) *error = Noted(driver_.StreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  if (*error != CUDA_SUCCESS) return nullptr;
  const int number = Number(stream);
  std::lock_guard hold(streams_lock_);
  const size_t kind = 1 + made_.size() % (kStreamKinds - 1);
  made_.push_back(stream);
  given_.reserve(made_.size());
  if (number >= 0) of_kind_[kind] |= Bit(number);
  return stream;
}

void Device::GiveStream(CUstream stream) {
  std::lock_guard hold(streams_lock_);
  given_.push_back(stream);
}

// A stream that cannot be queried because another one's capture forbids it counts as captured.
bool Device::Capturing(CUstream stream, CUresult* error) {
  int status = CU_STREAM_CAPTURE_STATUS_NONE;
  *error = driver_.StreamIsCapturing(stream, &status);
  if (*error == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) return true;
  return *error == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
}

int Device::IsCapturing(CUstream stream) {
  const memmgr::EnsureContext context = EnsureContext();
  CUresult error = CUDA_SUCCESS;
  const bool capturing = Capturing(stream, &error);
  return error == CUDA_SUCCESS ? capturing : -1;
}

bool Device::AnyCapturing() {
  CUresult error;
  const std::vector<CUstream> streams = StreamsOf(~StreamMask{0}, reinterpret_cast<CUstream>(-1));
  return std::any_of(streams.begin(), streams.end(), [&](CUstream stream) { return Capturing(stream, &error); });
}

CUevent Device::TakeEvent() {
  {
    std::lock_guard hold(events_lock_);
    if (!events_.empty()) {
      CUevent event = events_.back();
      events_.pop_back();
      return event;
    }
  }
  CUevent event = nullptr;
  Noted(driver_.EventCreate(&event, CU_EVENT_DISABLE_TIMING));
  return event;
}

void Device::ReturnEvent(CUevent event) {
  {
    std::lock_guard hold(events_lock_);
    if (events_.size() < kSpareEvents) return events_.push_back(event);
  }
  driver_.EventDestroy(event);  // the driver destroys it after the streams that wait for it
}

// The caller has the context.
int Device::SynchronizeContext() {
  if (AnyCapturing()) return -EBUSY;
  const RelaxedCapture relaxed(driver_);
  ++synchronizations_;
  return DriverErrno(Noted(driver_.CtxSynchronize()));
}

int Device::WaitForTail(CUstream waiter, CUstream other) {
  if (waiter == other) return 0;
  const auto context = EnsureContext();
  if (context.error() != CUDA_SUCCESS) return DriverErrno(Noted(context.error()));
  const RelaxedCapture relaxed(driver_);
  CUresult error;
  // An event that is recorded there would belong to the capture.
  if (Capturing(other, &error)) return -EBUSY;
  if (error == CUDA_SUCCESS) {
    error = driver_.StreamQuery(other);
    if (error == CUDA_SUCCESS) return 0;  // nothing is queued
  }
  if (error == CUDA_ERROR_NOT_READY) {
    // The wait is for the event's present state: the event can be used again at once.
    CUevent event = TakeEvent();
    if (event != nullptr) {
      error = driver_.EventRecord(event, other);
      if (error == CUDA_SUCCESS) error = driver_.StreamWaitEvent(waiter, event, 0);
      ReturnEvent(event);
    }
    if (error == CUDA_SUCCESS) {
      ++waits_;
      return 0;
    }
  }
  // Destroyed by its owner, or of another device. Its queued work may still run.
  Noted(error);
  if (driver_.StreamSynchronize(other) == CUDA_SUCCESS) {
    ++synchronizations_;
    return 0;
  }
  return Synchronize();  // It settles all free memory, so that no other piece waits again.
}

// ---- allocate and free -----------------------------------------------------------------------------------------

void* Device::Place(const Request& request, StreamOrder* order) {
  return request.only_try ? arena_->TryAlloc(request.bytes, request.keep_free, order)
                          : arena_->Alloc(request.bytes, order);
}

// The first try does nothing that may wait, and nearly always that is all: no driver call then. Only when a stream has
// to be waited for, or memory has to be made, is it worth asking whether the stream is being captured.
void* Device::AllocAt(const Request& request, CUstream stream) {
  if (forked() || request.bytes == 0) return nullptr;
  const int number = Number(stream);
  if (number < 0) return nullptr;
  StreamOrder order{.own = Bit(number),
                    .home = static_cast<uint16_t>(number),
                    .pool = active_pool_.load(std::memory_order_relaxed),
                    .at_once = true};
  const bool deferred = Defer(false);  // allocations on the way to it are not deferred
  const auto again = [&](void* placed) {
    Defer(deferred);
    return placed;
  };
  void* p = Place(request, &order);
  if (p != nullptr && !deferred && Foreign(order.touched, number) == 0) return p;
  const auto context = EnsureContext();
  CUresult error;
  const bool captured = Capturing(stream, &error);
  order.at_once = order.beyond = captured;
  for (StreamMask avoid = captured ? Foreign(~StreamMask{0}, number) : 0;;) {
    if (p != nullptr) {
      const StreamMask foreign = Foreign(order.touched, number);
      if (deferred && !captured && (order.touched & kAnything) == 0) {
        arena_->Inherit(p, order);
        return again(p);
      }
      if (foreign == 0) return again(p);
      const StreamMask failed =
          captured ? foreign : Order<"reuse.touched">([&] { return WaitFor(stream, foreign, order.times); });
      if (failed == 0) {
        ++cross_reuses_;
        arena_->Waited(p, order, Clock().load());
        return again(p);
      }
      arena_->Return(p, order);
      avoid |= failed;
    }
    order.allowed = ~avoid;
    p = Place(request, &order);
    if (p == nullptr) return again(nullptr);
  }
}

void* Device::Alloc(uint64_t bytes, CUstream stream) { return AllocAt({bytes, false, 0}, stream); }

void* Device::TryAlloc(uint64_t bytes, uint64_t keep_free, CUstream stream) {
  return AllocAt({bytes, true, keep_free}, stream);
}

void Device::Free(void* p) {
  arena_->Free(p, Order<"freed.time">([] { return Clock().load(); }));
  if (unused_pools_.load(std::memory_order_relaxed) > 0) EndUnusedPools();
}

void Device::Touch(const void* block, CUstream by) {
  const int number = Number(by);
  const StreamMask bit = number < 0 ? kAnything : Bit(number);
  const size_t kind = KindOf(by);
  const uint64_t now = Order<"used.time">([] { return Clock().load(); });
  Order<"used.touched">([&] {
    const bool lent = IfLent(block, [&](Lent& found) {
      found.touched |= bit;
      found.times.at[kind] = std::max(found.times.at[kind], now);
    });
    if (!lent) arena_->Touch(block, bit, kind, now);
    return 0;
  });
}

void Device::Untouch(const void* block, CUstream by, uint64_t mark) {
  const int number = Number(by);
  if (number < 0 || number >= kSharedBit) return;
  const size_t kind = KindOf(by);
  const bool lent = IfLent(block, [&](Lent& found) {
    if (found.times.at[kind] < mark) found.touched &= ~Bit(number);
  });
  if (lent) return;
  StreamMask of_kind;
  {
    std::lock_guard hold(streams_lock_);
    of_kind = of_kind_[kind];
  }
  arena_->Untouch(block, Bit(number), kind, of_kind, mark);
}

CUstream Device::Home(const void* block) {
  CUstream home = nullptr;
  if (IfLent(block, [&](const Lent& lent) { home = lent.home; })) return home;
  const int64_t number = arena_->Home(block);
  std::lock_guard hold(streams_lock_);
  return number < 0 ? nullptr : streams_[static_cast<size_t>(number)];
}

uint64_t Device::Trim(uint64_t keep_bytes) { return arena_->Trim(keep_bytes); }

// ---- copies ----------------------------------------------------------------------------------------------------

CUresult Device::Copy(void* to, const void* from, size_t bytes, CUstream stream) {
  if (forked()) return CUDA_ERROR_DEINITIALIZED;
  const auto context = EnsureContext();
  if (context.error() != CUDA_SUCCESS) return Noted(context.error());
  return Noted(
      driver_.MemcpyAsync(reinterpret_cast<CUdeviceptr>(to), reinterpret_cast<CUdeviceptr>(from), bytes, stream));
}

CUresult Device::Fetch(void* to_host, const void* from, size_t bytes, CUstream stream) {
  if (const CUresult error = Copy(to_host, from, bytes, stream); error != CUDA_SUCCESS) return error;
  const auto context = EnsureContext();
  return Noted(Order<"fetch.done">([&] { return driver_.StreamSynchronize(stream); }));
}

// ---- pools -----------------------------------------------------------------------------------------------------

Device::Pool* Device::FindPool(uint64_t a, uint64_t b) {
  const auto found = std::find_if(pools_.begin(), pools_.end(), [&](const Pool& p) { return p.a == a && p.b == b; });
  return found != pools_.end() ? &*found : nullptr;
}

int Device::BeginPool(uint64_t a, uint64_t b) {
  if (forked()) return -1;
  std::lock_guard hold(pools_lock_);
  Pool* pool = FindPool(a, b);
  if (pool == nullptr) {
    uint8_t number = 1;
    const auto taken = [&](const Pool& other) { return other.number == number; };
    while (number < kAway && std::any_of(pools_.begin(), pools_.end(), taken)) ++number;
    if (number == kAway || !arena_->ReservePool(number)) return -1;
    pools_.push_back({a, b, number, 0});
    pool = &pools_.back();
  } else if (pool->uses == 0) {
    --unused_pools_;
  }
  active_.push_back(pool->number);
  ++pool->uses;
  active_pool_ = pool->number;
  return 0;
}

int Device::EndPool(uint64_t a, uint64_t b) {
  if (forked()) return -1;
  std::lock_guard hold(pools_lock_);
  const Pool* pool = FindPool(a, b);
  if (pool == nullptr) return -1;
  const auto at = std::find(active_.rbegin(), active_.rend(), pool->number);
  if (at == active_.rend()) return -1;
  active_.erase(std::prev(at.base()));
  active_pool_ = active_.empty() ? uint8_t{0} : active_.back();
  return 0;
}

int Device::ReleasePool(uint64_t a, uint64_t b) {
  if (forked()) return -1;
  {
    std::lock_guard hold(pools_lock_);
    Pool* pool = FindPool(a, b);
    if (pool == nullptr || pool->uses == 0) return -1;
    if (--pool->uses > 0) return 0;
    ++unused_pools_;
  }
  EndUnusedPools();
  return 0;
}

// Replays of a graph, and their streams, are not reported: the memory counts as touched by all streams.
void Device::EndUnusedPools() {
  std::lock_guard hold(pools_lock_);
  std::erase_if(pools_, [&](const Pool& pool) {
    if (pool.uses > 0 || arena_->PoolBlocks(pool.number) > 0) return false;
    if (std::find(active_.begin(), active_.end(), pool.number) != active_.end()) return false;
    arena_->EndPool(pool.number, Order<"pool.touched">([] { return kAnything; }));
    --unused_pools_;
    return true;
  });
}

// ---- look ------------------------------------------------------------------------------------------------------

void Device::Stats(mm_device_stats* out) {
  const PageCounts& counts = pages_.counts();
  *out = {};
  out->waits = waits_;
  out->cross_reuses = cross_reuses_;
  out->synchronizations = synchronizations_;
  out->maps = counts.maps;
  out->unmaps = counts.unmaps;
  out->map_nanoseconds = counts.map_nanoseconds;
  out->unmap_nanoseconds = counts.unmap_nanoseconds;
  out->driver_errors = driver_errors_ + counts.errors + kernels_.errors();
  {
    std::lock_guard hold(streams_lock_);
    out->streams = streams_.size();
  }
  std::lock_guard hold(pools_lock_);
  out->pools = pools_.size();
}

}  // namespace memmgr
