#include "device_pages.h"

#include <errno.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <utility>

#include "timed.h"

namespace memmgr {
namespace {

constexpr size_t kPlainPageBytes = size_t{1} << 16;
constexpr size_t kUsualPage = size_t{2} << 20;
// Sites are mapped once, so their frames may be small: as little as possible of a site's last one is lost.
constexpr size_t kFramesPerPage = 8;
constexpr size_t kMostPage = size_t{64} << 20;
constexpr uint64_t kManyBytes = uint64_t{256} << 20;
constexpr int kAccessTries = 2000;
constexpr std::chrono::milliseconds kAccessPause{1};

CUdeviceptr Address(void* at) { return reinterpret_cast<CUdeviceptr>(at); }

CUmemAllocationProp Properties(int ordinal) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, ordinal};
  return properties;
}

CUmemAccessDesc AccessOf(int ordinal) {
  return {{CU_MEM_LOCATION_TYPE_DEVICE, ordinal}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
}

// A page is a 65,536th of the device's memory, so that the ends of some hundred runs of blocks are small in comparison,
// and no less than the driver's least. Smaller pages are moved more often before a period has sites, and larger ones
// leave more of the memory between long-lived blocks unused. MEMMGR_CUDA_PAGE (bytes) overrides it.
size_t PageBytes(size_t granularity, size_t total_bytes) {
  const char* asked = getenv("MEMMGR_CUDA_PAGE");
  const size_t usual = total_bytes / 65536 > kUsualPage ? total_bytes / 65536 : granularity;
  const size_t wanted = asked != nullptr ? strtoull(asked, nullptr, 10) : usual;
  return std::clamp(std::bit_floor(std::max<size_t>(wanted, 1)), granularity, std::max(granularity, kMostPage));
}

}  // namespace

DevicePages::DevicePages(const mm_driver& driver, int ordinal, Settler* settler)
    : driver_(driver), ordinal_(ordinal), settler_(settler) {
  ops_.user = this;
}

CUresult DevicePages::UseMapped() {
  const EnsureContext context(driver_, ordinal_);
  if (context.error() != CUDA_SUCCESS) return context.error();
  const CUmemAllocationProp properties = Properties(ordinal_);
  size_t granularity = 0;
  const CUresult error =
      driver_.MemGetAllocationGranularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  if (error != CUDA_SUCCESS) return error;
  if (!std::has_single_bit(granularity)) return CUDA_ERROR_NOT_SUPPORTED;
  CUdevice device = 0;
  int integrated = 0;
  size_t free_bytes = 0, total_bytes = 0;
  if (driver_.MemGetInfo(&free_bytes, &total_bytes) != CUDA_SUCCESS) total_bytes = 0;
  if (driver_.DeviceGet(&device, ordinal_) == CUDA_SUCCESS &&
      driver_.DeviceGetAttribute(&integrated, CU_DEVICE_ATTRIBUTE_INTEGRATED, device) == CUDA_SUCCESS)
    integrated_ = integrated != 0;
  ops_.page_bytes = PageBytes(granularity, total_bytes);
  ops_.frame_bytes = std::max(ops_.page_bytes / kFramesPerPage, granularity);
  ops_.give_back = GiveBack::kAfterSettle;
  ops_.reserve = [](void* user, size_t bytes) { return Of(user)->Reserve(bytes); };
  ops_.commit = [](void* user, void* at, size_t bytes) { return Of(user)->Commit(Address(at), bytes); };
  ops_.decommit = [](void* user, void* at, size_t bytes) { return Of(user)->Decommit(Address(at), bytes); };
  ops_.release = [](void* user, void* base, size_t bytes) { Of(user)->Release(Address(base), bytes); };
  ops_.settle = [](void* user, StreamMask touched, const StreamTimes& times) {
    return Of(user)->settler_->Settle(touched, times);
  };
  ops_.release_kept = [](void* user) { Of(user)->ReleaseKept(); };
  ops_.take_frame = [](void* user) { return Of(user)->TakeFrame(); };
  ops_.give_frame = [](void* user, uint64_t frame) {
    std::lock_guard hold(Of(user)->lock_);
    Of(user)->kept_frames_.push_back(frame);
  };
  ops_.map_frames = [](void* user, void* at, const uint64_t* frames, size_t count) {
    return Of(user)->MapFrames(Address(at), frames, count);
  };
  ops_.unmap_frames = [](void* user, void* at, size_t count) { return Of(user)->UnmapFrames(Address(at), count); };
  return CUDA_SUCCESS;
}

CUresult DevicePages::UsePlain() {
  ops_.page_bytes = kPlainPageBytes;
  ops_.give_back = GiveBack::kNever;
  ops_.reserve = [](void* user, size_t bytes) -> void* {
    DevicePages* self = Of(user);
    const EnsureContext context(self->driver_, self->ordinal_);
    const Timed timed(&self->counts_.map_nanoseconds);
    CUdeviceptr at = 0;
    if (context.error() != CUDA_SUCCESS || self->driver_.MemAlloc(&at, bytes) != CUDA_SUCCESS) {
      errno = ENOMEM;
      return nullptr;
    }
    ++self->counts_.maps;
    return reinterpret_cast<void*>(at);
  };
  ops_.commit = [](void*, void*, size_t) { return 0; };
  ops_.decommit = [](void*, void*, size_t) { return -EPERM; };
  ops_.release = [](void* user, void* base, size_t) {
    DevicePages* self = Of(user);
    const EnsureContext context(self->driver_, self->ordinal_);
    ++self->counts_.unmaps;
    self->Noted(self->driver_.MemFree(Address(base)));
  };
  return CUDA_SUCCESS;
}

void* DevicePages::Reserve(size_t bytes) {
  const EnsureContext context(driver_, ordinal_);
  auto mapped = std::make_unique<PageMap>(bytes / ops_.page_bytes);
  handles_.assign(bytes / ops_.page_bytes, 0);
  kept_.reserve(handles_.size());  // to give back must not throw
  kept_frames_.reserve(handles_.size() * (ops_.page_bytes / ops_.frame_bytes));
  if (context.error() != CUDA_SUCCESS || driver_.MemAddressReserve(&base_, bytes, 0, 0, 0) != CUDA_SUCCESS) {
    errno = ENOMEM;
    return nullptr;
  }
  mapped_ = std::move(mapped);
  pages_ = bytes / ops_.page_bytes;
  access_ = {AccessOf(ordinal_)};
  return reinterpret_cast<void*>(base_);
}

// The driver of WSL 2 has been seen to answer NOT_READY while other work is queued: it is asked again, for two seconds.
CUresult DevicePages::GrantAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc* to, size_t count) {
  CUresult error = driver_.MemSetAccess(at, bytes, to, count);
  for (int tries = 0; error == CUDA_ERROR_NOT_READY && tries < kAccessTries; ++tries) {
    std::this_thread::sleep_for(kAccessPause);
    error = driver_.MemSetAccess(at, bytes, to, count);
  }
  return error;
}

int DevicePages::Allow(int peer_ordinal) {
  std::lock_guard hold(lock_);
  if (mapped_ == nullptr) return -1;
  for (const CUmemAccessDesc& known : access_)
    if (known.location.id == peer_ordinal) return CUDA_SUCCESS;
  const EnsureContext context(driver_, ordinal_);
  if (context.error() != CUDA_SUCCESS) return Noted(context.error());
  const RelaxedCapture relaxed(driver_);
  const CUmemAccessDesc peer = AccessOf(peer_ordinal);
  for (uint64_t page = 0; (page = mapped_->Next(page, pages_, true)) < pages_;) {
    const uint64_t end = mapped_->Next(page, pages_, false);
    const CUresult error = Noted(GrantAccess(At(page), (end - page) * ops_.page_bytes, &peer, 1));
    if (error != CUDA_SUCCESS) return error;
    page = end;
  }
  for (auto frame = at_frames_.begin(); frame != at_frames_.end();) {
    const CUdeviceptr at = *frame;
    size_t bytes = 0;
    for (; frame != at_frames_.end() && *frame == at + bytes; ++frame) bytes += ops_.frame_bytes;
    const CUresult error = Noted(GrantAccess(at, bytes, &peer, 1));
    if (error != CUDA_SUCCESS) return error;
  }
  access_.push_back(peer);
  return CUDA_SUCCESS;
}

// Returns 0 with the driver's error. Kept memory is used again: that of the other size is given back first, so that
// the sum of both does not grow.
CUmemGenericAllocationHandle DevicePages::TakeHandle(Kept* kept, Kept* other, size_t bytes, CUresult* error) {
  CUmemGenericAllocationHandle handle = 0;
  *error = CUDA_SUCCESS;
  if (!kept->empty()) {
    handle = kept->back();
    kept->pop_back();
    return handle;
  }
  const size_t others = std::max<size_t>(bytes / ops_.frame_bytes, 1);
  for (size_t i = 0; i < others && !other->empty(); ++i) {
    Noted(driver_.MemRelease(other->back()));
    other->pop_back();
  }
  const CUmemAllocationProp properties = Properties(ordinal_);
  *error = driver_.MemCreate(&handle, bytes, &properties, 0);
  return *error == CUDA_SUCCESS ? handle : 0;
}

uint64_t DevicePages::TakeFrame() {
  std::lock_guard hold(lock_);
  const EnsureContext context(driver_, ordinal_);
  if (context.error() != CUDA_SUCCESS) return 0;
  const RelaxedCapture relaxed(driver_);
  const Timed timed(&counts_.map_nanoseconds);
  CUresult error;
  const CUmemGenericAllocationHandle handle = TakeHandle(&kept_frames_, &kept_, ops_.frame_bytes, &error);
  Noted(error);
  return handle;
}

int DevicePages::MapFrames(CUdeviceptr at, const uint64_t* frames, size_t count) {
  std::lock_guard hold(lock_);
  const EnsureContext context(driver_, ordinal_);
  if (context.error() != CUDA_SUCCESS) return DriverErrno(Noted(context.error()));
  const RelaxedCapture relaxed(driver_);
  const Timed timed(&counts_.map_nanoseconds);
  const size_t bytes = ops_.frame_bytes;
  CUresult error = CUDA_SUCCESS;
  size_t mapped = 0;
  for (; mapped < count && error == CUDA_SUCCESS; ++mapped)
    error = driver_.MemMap(at + mapped * bytes, bytes, 0, frames[mapped], 0);
  if (error != CUDA_SUCCESS) --mapped;
  counts_.maps += mapped;
  if (error == CUDA_SUCCESS) error = GrantAccess(at, count * bytes, access_.data(), access_.size());
  if (error == CUDA_SUCCESS) {
    for (size_t i = 0; i < count; ++i) at_frames_.insert(at + i * bytes);
    return 0;
  }
  Noted(error);
  if (mapped > 0 && Noted(driver_.MemUnmap(at, mapped * bytes)) == CUDA_SUCCESS) counts_.unmaps += mapped;
  return DriverErrno(error);
}

int DevicePages::UnmapFrames(CUdeviceptr at, size_t count) {
  std::lock_guard hold(lock_);
  const EnsureContext context(driver_, ordinal_);
  if (context.error() != CUDA_SUCCESS) return DriverErrno(Noted(context.error()));
  const RelaxedCapture relaxed(driver_);
  const Timed timed(&counts_.unmap_nanoseconds);
  const CUresult error = Noted(driver_.MemUnmap(at, count * ops_.frame_bytes));
  if (error != CUDA_SUCCESS) return DriverErrno(error);
  for (size_t i = 0; i < count; ++i) at_frames_.erase(at + i * ops_.frame_bytes);
  counts_.unmaps += count;
  return 0;
}

CUresult DevicePages::MapPage(uint64_t page) {
  CUresult error;
  const CUmemGenericAllocationHandle handle = TakeHandle(&kept_, &kept_frames_, ops_.page_bytes, &error);
  if (error != CUDA_SUCCESS) return error;
  error = driver_.MemMap(At(page), ops_.page_bytes, 0, handle, 0);
  if (error == CUDA_SUCCESS) {
    handles_[page] = handle;
    ++counts_.maps;
  } else {
    Noted(driver_.MemRelease(handle));
  }
  return error;
}

void DevicePages::ReleaseKept() {
  std::lock_guard hold(lock_);
  if (kept_.empty() && kept_frames_.empty()) return;
  const EnsureContext context(driver_, ordinal_);
  if (context.error() != CUDA_SUCCESS) return;
  const RelaxedCapture relaxed(driver_);
  const Timed timed(&counts_.unmap_nanoseconds);
  EndKept();
}

void DevicePages::EndKept() {
  for (Kept* kept : {&kept_, &kept_frames_}) {
    for (const CUmemGenericAllocationHandle handle : *kept) Noted(driver_.MemRelease(handle));
    kept->clear();
  }
}

// A page costs tens of microseconds: a request far above the free memory is not tried page by page. A close one may
// fit: the driver's figure is not exact.
bool DevicePages::HasRoom(uint64_t pages) const {
  size_t free_bytes = 0, total_bytes = 0;
  const uint64_t bytes = pages * ops_.page_bytes;
  if (bytes < kManyBytes || integrated_ || driver_.MemGetInfo(&free_bytes, &total_bytes) != CUDA_SUCCESS) return true;
  const uint64_t kept = kept_.size() * ops_.page_bytes + kept_frames_.size() * ops_.frame_bytes;
  return bytes <= free_bytes + kept + kManyBytes;
}

// Unmaps the mapped pages in [first, end): each contiguous run of them with one call, because a driver takes a range of
// whole mappings. A run that it refuses is tried page by page. Returns the first page that is refused, or end.
uint64_t DevicePages::UnmapPages(uint64_t first, uint64_t end) {
  for (uint64_t page = first; (page = mapped_->Next(page, end, true)) < end;) {
    const uint64_t past = mapped_->Next(page, end, false);
    if (UnmapRun(page, past)) continue;
    if (past == page + 1) return page;
    for (; page < past; ++page)
      if (!UnmapRun(page, page + 1)) return page;
  }
  return end;
}

bool DevicePages::UnmapRun(uint64_t first, uint64_t end) {
  if (Noted(driver_.MemUnmap(At(first), (end - first) * ops_.page_bytes)) != CUDA_SUCCESS) return false;
  mapped_->Clear(first, end);
  counts_.unmaps += end - first;
  for (uint64_t page = first; page < end; ++page) kept_.push_back(std::exchange(handles_[page], 0));
  return true;
}

int DevicePages::Commit(CUdeviceptr at, size_t bytes) {
  std::lock_guard hold(lock_);
  const EnsureContext context(driver_, ordinal_);
  if (context.error() != CUDA_SUCCESS) return DriverErrno(Noted(context.error()));
  const RelaxedCapture relaxed(driver_);
  const Timed timed(&counts_.map_nanoseconds);
  const uint64_t first = (at - base_) / ops_.page_bytes;
  const uint64_t end = first + bytes / ops_.page_bytes;
  CUresult error = HasRoom(mapped_->CountHoles(first, end)) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
  for (uint64_t page = first; page < end && error == CUDA_SUCCESS; ++page) {
    // A page that the driver once refused to unmap is still mapped.
    if (mapped_->CountHoles(page, page + 1) == 0) continue;
    error = MapPage(page);
    if (error == CUDA_SUCCESS) mapped_->Set(page, page + 1);
  }
  if (error == CUDA_SUCCESS) error = GrantAccess(at, bytes, access_.data(), access_.size());
  if (error != CUDA_SUCCESS) UnmapPages(first, end);  // no work has seen them
  return DriverErrno(Noted(error));
}

int DevicePages::Decommit(CUdeviceptr at, size_t bytes) {
  std::lock_guard hold(lock_);
  const EnsureContext context(driver_, ordinal_);
  if (context.error() != CUDA_SUCCESS) return DriverErrno(Noted(context.error()));
  const RelaxedCapture relaxed(driver_);
  const Timed timed(&counts_.unmap_nanoseconds);
  const uint64_t first = (at - base_) / ops_.page_bytes;
  const uint64_t end = first + bytes / ops_.page_bytes;
  for (uint64_t page = first; page < end;) {
    page = UnmapPages(page, end);
    // Refused. Where other pages are unmapped already there is no way back: the page stays mapped, and Commit records
    // it.
    if (page < end && page == first) return -EIO;
    if (page < end) ++page;
  }
  return 0;
}

void DevicePages::Release(CUdeviceptr base, size_t bytes) {
  std::lock_guard hold(lock_);
  const EnsureContext context(driver_, ordinal_);
  if (context.error() != CUDA_SUCCESS) return;
  const uint64_t pages = bytes / ops_.page_bytes;
  for (uint64_t page = 0; (page = mapped_->Next(page, pages, true)) < pages;) {
    const uint64_t end = mapped_->Next(page, pages, false);
    const uint64_t refused = UnmapPages(page, end);
    page = refused < end ? refused + 1 : end;
  }
  EndKept();
  Noted(driver_.MemAddressFree(base, bytes));
}

}  // namespace memmgr
