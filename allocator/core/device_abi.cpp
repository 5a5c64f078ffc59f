// The C ABI of a device's memory: casts, and nothing that C++ throws gets past it.
#include <errno.h>

#include <string>

#include "device.h"
#include "guarded.h"

namespace {

using memmgr::Guarded;

memmgr::Device* Of(mm_device* device) { return reinterpret_cast<memmgr::Device*>(device); }

// A forked child makes no call of the driver; work that was pending at the fork stays pending.
template <typename Call>
int OnKernels(mm_device* device, Call call) {
  if (Of(device)->forked()) return -ECANCELED;
  return Guarded(-ENOMEM, [&] { return call(Of(device)->kernels()); });
}

}  // namespace

extern "C" {

mm_device* mm_device_open(const mm_driver* driver, int ordinal, uint64_t budget_bytes, int memory, char* err,
                          size_t err_len) {
  std::string wrong = "out of memory";
  auto* device = Guarded<memmgr::Device*>(
      nullptr, [&] { return memmgr::Device::Open(*driver, ordinal, budget_bytes, memory, &wrong); });
  if (device == nullptr) memmgr::Say(wrong, err, err_len);
  return reinterpret_cast<mm_device*>(device);
}

int mm_device_close(mm_device* device) {
  return device == nullptr ? 0 : Guarded(-1, [&] { return memmgr::Device::Close(Of(device)); });
}

mm_arena* mm_device_arena(mm_device* device) { return reinterpret_cast<mm_arena*>(&Of(device)->arena()); }
int mm_device_ordinal(mm_device* device) { return Of(device)->ordinal(); }

int mm_device_memory(mm_device* device, uint64_t* free_bytes, uint64_t* total_bytes) {
  size_t free_now = 0, total = 0;
  const CUresult error = Of(device)->forked() ? CUDA_ERROR_DEINITIALIZED : Of(device)->Memory(&free_now, &total);
  *free_bytes = free_now;
  *total_bytes = total;
  return error;
}

int mm_device_broken(mm_device* device, char* why, size_t length) {
  return Guarded(-1, [&] {
    size_t free_now = 0, total = 0;
    const CUresult error = Of(device)->forked() ? CUDA_SUCCESS : Of(device)->Memory(&free_now, &total);
    if (error == CUDA_SUCCESS) return error;
    std::string text = memmgr::DriverText(Of(device)->driver(), error);
    const bool ended = error == CUDA_ERROR_INVALID_CONTEXT || error == CUDA_ERROR_CONTEXT_IS_DESTROYED;
    text += ended ? "; the device's context has ended, after cudaDeviceReset for example, and this process's memory on "
                    "the device with it: the process has to be started anew"
                  : "; an earlier kernel failed, and CUDA_LAUNCH_BLOCKING=1 shows which";
    // Where a program uses several streams, a cell that is absent has a null pointer and no trap.
    if (error == CUDA_ERROR_ILLEGAL_ADDRESS)
      text +=
          "; a library that reads addresses past torch's dispatcher may have met a tensor that is not in memory: "
          "memmgr.pin(tensor) keeps it there";
    memmgr::Say(text, why, length);
    return error;
  });
}

int mm_device_allow(mm_device* device, int peer_ordinal) {
  return Guarded(-1, [&] { return Of(device)->Allow(peer_ordinal); });
}

void* mm_device_alloc(mm_device* device, size_t bytes, mm_stream stream) {
  return Guarded<void*>(nullptr, [&] { return Of(device)->Alloc(bytes, stream); });
}

void* mm_device_try_alloc(mm_device* device, size_t bytes, uint64_t keep_free, mm_stream stream) {
  return Guarded<void*>(nullptr, [&] { return Of(device)->TryAlloc(bytes, keep_free, stream); });
}

void mm_device_free(mm_device* device, void* p) { Of(device)->Free(p); }

void mm_device_used(mm_device* device, void* p, mm_stream stream) {
  Guarded(0, [&] { return Of(device)->Touch(p, stream), 0; });
}

const uint64_t* mm_device_clock(void) {
  static_assert(sizeof(std::atomic<uint64_t>) == sizeof(uint64_t) && std::atomic<uint64_t>::is_always_lock_free);
  return reinterpret_cast<const uint64_t*>(&memmgr::Device::Clock());
}

void mm_device_mark(mm_device* device, mm_stream stream) {
  Guarded(0, [&] { return Of(device)->MarkTail(stream), 0; });
}

void mm_device_note_use(mm_device* device, const void* p, uint64_t time) {
  Guarded(0, [&] { return Of(device)->NoteUse(p, time), 0; });
}

int mm_device_defer_waits(int on) { return memmgr::Device::Defer(on != 0) ? 1 : 0; }

mm_stream mm_device_home(mm_device* device, const void* p) { return Of(device)->Home(p); }

int mm_device_wait(mm_device* device, mm_stream waiter, mm_stream other) {
  return Guarded(-1, [&] { return Of(device)->WaitForTail(waiter, other); });
}

int mm_device_wait_block(mm_device* device, mm_stream waiter, const void* p) {
  return Guarded(-1, [&] { return Of(device)->WaitForTouched(waiter, p); });
}

int mm_device_is_capturing(mm_device* device, mm_stream stream) {
  return Guarded(-1, [&] { return Of(device)->IsCapturing(stream); });
}

int mm_device_synchronize(mm_device* device) {
  return Guarded(-1, [&] {
    const int error = Of(device)->Synchronize();
    if (error == 0) Of(device)->kernels().EndDropped();
    return error;
  });
}

void mm_device_lend(mm_device* device, const void* p, uint64_t bytes, mm_stream home) {
  Guarded(0, [&] { return Of(device)->Lend(p, bytes, home), 0; });
}

void mm_device_lent_ends(mm_device* device, const void* p) {
  Guarded(0, [&] { return Of(device)->LentEnds(p), 0; });
}

void mm_device_forget_lent(mm_device* device) { Of(device)->ForgetLent(); }

uint64_t mm_device_trim(mm_device* device, uint64_t keep_bytes) { return Of(device)->Trim(keep_bytes); }

int mm_device_copy(mm_device* device, void* to, const void* from, size_t bytes, mm_stream stream) {
  return Of(device)->Copy(to, from, bytes, stream);
}

int mm_device_fetch(mm_device* device, void* to_host, const void* from, size_t bytes, mm_stream stream) {
  return Of(device)->Fetch(to_host, from, bytes, stream);
}

int mm_device_has_kernels(mm_device* device) {
  return Guarded(0, [&]() -> int { return !Of(device)->forked() && Of(device)->kernels().Ready(); });
}

int mm_device_fill(mm_device* device, void* p, int byte, size_t bytes, mm_stream stream) {
  return OnKernels(device,
                   [&](auto& kernels) { return kernels.Fill(p, static_cast<unsigned char>(byte), bytes, stream); });
}

int mm_device_delay(mm_device* device, uint64_t nanoseconds, mm_stream stream) {
  return OnKernels(device, [&](auto& kernels) { return kernels.Delay(nanoseconds, stream); });
}

int mm_device_compare(mm_device* device, const void* first, const void* second, size_t bytes, int fill,
                      mm_stream stream, unsigned* found) {
  return OnKernels(device, [&](auto& kernels) { return kernels.Compare(first, second, bytes, fill, stream, found); });
}

int mm_device_sum(mm_device* device, const void* p, size_t bytes, mm_stream stream, uint64_t* sum) {
  return OnKernels(device, [&](auto& kernels) { return kernels.Sum(p, bytes, stream, sum); });
}

int mm_device_sum_begin(mm_device* device, const void* block, size_t bytes, mm_stream stream, mm_sum** sum) {
  return OnKernels(device, [&](auto& kernels) {
    const int error = kernels.BeginSum(block, bytes, stream, sum);
    if (error == 0) Of(device)->Touch(block, stream);
    return error;
  });
}

int mm_device_sum_is_there(mm_device* device, mm_sum* sum) {
  return OnKernels(device, [&](auto& kernels) { return static_cast<int>(kernels.SumIsThere(sum)); });
}

int mm_device_sum_end(mm_device* device, mm_sum* sum, uint64_t* value) {
  return OnKernels(device, [&](auto& kernels) { return kernels.EndSum(sum, value); });
}

void mm_device_sum_drop(mm_device* device, mm_sum* sum) {
  OnKernels(device, [&](auto& kernels) { return kernels.DropSum(sum), 0; });
}

int mm_device_synchronize_stream(mm_device* device, mm_stream stream) {
  return OnKernels(device, [&](auto& kernels) { return kernels.SynchronizeStream(stream); });
}

int mm_device_begin_pool(mm_device* device, uint64_t pool_a, uint64_t pool_b) {
  return Guarded(-1, [&] { return Of(device)->BeginPool(pool_a, pool_b); });
}

int mm_device_end_pool(mm_device* device, uint64_t pool_a, uint64_t pool_b) {
  return Of(device)->EndPool(pool_a, pool_b);
}

int mm_device_release_pool(mm_device* device, uint64_t pool_a, uint64_t pool_b) {
  return Of(device)->ReleasePool(pool_a, pool_b);
}

void mm_device_stats_get(mm_device* device, mm_device_stats* out) { Of(device)->Stats(out); }

}  // extern "C"
