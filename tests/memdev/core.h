// memmgr's core as the allocator of memdev, without torch's pager between: torch trains on the memory of mm_device_*.
#pragma once

#include "native.h"

namespace memdev {

// From memmgr/device.h; looked up by the caller, so that memdev is not linked against the core.
struct CoreFunctions {
  void* (*alloc)(void* device, size_t bytes, void* stream);
  void (*free)(void* device, void* p);
  void (*used)(void* device, void* p, void* stream);
};

class CoreMemory : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    int device = thread_state.device;
    c10::Device where(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device));
    if (n == 0) return c10::DataPtr(nullptr, where);
    TORCH_CHECK(devices[device] != nullptr, "memdev: the core has no device ", device);
    void* p = functions.alloc(devices[device], n, CurrentStream(device));
    TORCH_CHECK_WITH(OutOfMemoryError, p != nullptr, "memdev: the core has no room for ", n, " bytes");
    return c10::DataPtr(p, new Owned{p, device}, &CoreMemory::Free, where);
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { memory.copy_data(to, from, bytes); }

  CoreFunctions functions = {};
  void* devices[kMostDevices] = {};

 private:
  struct Owned {
    void* p;
    int device;
  };
  static void Free(void* raw);
};

inline CoreMemory& core_memory = *new CoreMemory;

inline void CoreMemory::Free(void* raw) {
  std::unique_ptr<Owned> owned(static_cast<Owned*>(raw));
  if (!closing.load()) core_memory.functions.free(core_memory.devices[owned->device], owned->p);
}

inline void UseCore(int ordinal, void* device, const CoreFunctions& functions) {
  core_memory.functions = functions;
  core_memory.devices[ordinal] = device;
  record_stream_hook.store(
      [](void* p, int at, void* stream) { core_memory.functions.used(core_memory.devices[at], p, stream); });
  c10::SetAllocator(c10::kPrivateUse1, &core_memory, 255);
}

}  // namespace memdev
