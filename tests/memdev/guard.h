// Devices, streams and events as torch asks for them.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>

#include "native.h"

namespace memdev {

// As CUDA does: a pool of streams, handed out in turns and never destroyed.
struct StreamPool {
  static constexpr size_t kStreams = 32;
  std::mutex mutex;
  std::array<std::vector<CUstream>, kMostDevices> streams;
  std::array<size_t, kMostDevices> next = {};

  CUstream Get(int device) {
    std::lock_guard<std::mutex> lock(mutex);
    auto& all = streams[device];
    size_t at = next[device]++ % kStreams;
    if (at >= all.size()) {
      UseDevice(device);
      CUstream stream = nullptr;
      MEMDEV_CHECK(driver.cuStreamCreate(&stream, 1));  // not ordered with the default stream
      all.push_back(stream);
    }
    return all[at];
  }
};
inline StreamPool& stream_pool = *new StreamPool;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::Device getDevice() const override { return OrCurrent(std::nullopt); }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device old = getDevice();
    setDevice(device);
    return old;
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < driver.devices, "memdev: there is no device ", device.index());
    thread_state.device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) thread_state.device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(driver.devices); }

  c10::Stream getStream(c10::Device device) const override {
    int i = OrCurrent(device).index();
    return Wrap(CurrentStream(i), i);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return Wrap(nullptr, OrCurrent(device).index()); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    int i = OrCurrent(device).index();
    return Wrap(stream_pool.Get(i), i);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    int i = stream.device_index();
    c10::Stream old = Wrap(CurrentStream(i), i);
    thread_state.streams[i] = Native(stream);
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return Native(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    UseDevice(stream.device_index());
    return Ready(driver.cuStreamQuery(Native(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    SynchronizeStream(stream.device_index(), Native(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    UseDevice(device);
    MEMDEV_CHECK(driver.cuCtxSynchronize());
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device,
              const c10::EventFlag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "memdev: the event is of device ", device);
    UseDevice(stream.device_index());
    if (*event == nullptr) MEMDEV_CHECK(driver.cuEventCreate(event, 0));
    MEMDEV_CHECK(driver.cuEventRecord(*event, Native(stream)));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    UseDevice(stream.device_index());
    MEMDEV_CHECK(driver.cuStreamWaitEvent(Native(stream), event, 0));
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    UseDevice(thread_state.device);  // a thread that has only asked so far has no context, which CUDA's runtime would give it
    return Ready(driver.cuEventQuery(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    UseDevice(thread_state.device);
    MEMDEV_CHECK(driver.cuEventSynchronize(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr && !closing.load()) driver.cuEventDestroy(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    RecordUse(data.get(), stream);
  }

  static bool Ready(int answer) {
    if (answer != kNotReady) Check(answer, "a query");
    return answer == 0;
  }
};

// Random ops draw from the CPU's default generator: memdev has none of its own.
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return driver.devices > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(driver.devices); }
  void setCurrentDevice(c10::DeviceIndex device) const override { thread_state.device = device; }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(thread_state.device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    c10::DeviceIndex old = getCurrentDevice();
    thread_state.device = device;
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  bool isPinnedPtr(const void* p) const override { return pinned_memory.Contains(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    ResizeStorage(storage.unsafeGetStorageImpl(), bytes);
  }
};

}  // namespace memdev
