// The driver library (a double of libcuda) as memdev sees it, and device work queued on its streams.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/Stream.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace memdev {

using CUstream = void*;
using CUevent = void*;
using CUcontext = void*;

#define MEMDEV_DRIVER_FUNCTIONS(X)                                         \
  X(cuInit, "cuInit", (unsigned flags))                                    \
  X(cuDeviceGetCount, "cuDeviceGetCount", (int* count))                    \
  X(cuDeviceGet, "cuDeviceGet", (int* device, int ordinal))                \
  X(cuRetain, "cuDevicePrimaryCtxRetain", (CUcontext*, int device))        \
  X(cuSetCurrent, "cuCtxSetCurrent", (CUcontext))                          \
  X(cuCtxSynchronize, "cuCtxSynchronize", ())                              \
  X(cuStreamCreate, "cuStreamCreate", (CUstream*, unsigned flags))         \
  X(cuStreamSynchronize, "cuStreamSynchronize", (CUstream))                \
  X(cuStreamQuery, "cuStreamQuery", (CUstream))                            \
  X(cuStreamIsCapturing, "cuStreamIsCapturing", (CUstream, int*))          \
  X(cuExchangeCaptureMode, "cuThreadExchangeStreamCaptureMode", (int*))    \
  X(cuStreamWaitEvent, "cuStreamWaitEvent", (CUstream, CUevent, unsigned)) \
  X(cuEventCreate, "cuEventCreate", (CUevent*, unsigned flags))            \
  X(cuEventDestroy, "cuEventDestroy_v2", (CUevent))                        \
  X(cuEventRecord, "cuEventRecord", (CUevent, CUstream))                   \
  X(cuEventQuery, "cuEventQuery", (CUevent))                               \
  X(cuEventSynchronize, "cuEventSynchronize", (CUevent))                   \
  X(cuMemAlloc, "cuMemAlloc_v2", (unsigned long long*, size_t))            \
  X(cuMemFree, "cuMemFree_v2", (unsigned long long))                       \
  X(cuMemHostAlloc, "cuMemHostAlloc", (void**, size_t, unsigned))          \
  X(cuMemFreeHost, "cuMemFreeHost", (void*))                               \
  X(cuLaunchHostFunc, "cuLaunchHostFunc", (CUstream, void (*)(void*), void*))

constexpr int kNotReady = 600;  // CUDA_ERROR_NOT_READY
constexpr int kMostDevices = 8;

// Functions of the double alone: its virtual time (driver/virtual_time.h).
#define MEMDEV_DOUBLE_FUNCTIONS(X)                                                                              \
  X(void, next_work, "fake_next_work", (int engine, double seconds, double host_seconds, uint64_t bytes, const char*)) \
  X(double, figure, "fake_figure", (const char* name))

enum Engine { kNoEngine = 0, kCompute = 1, kOut = 2, kIn = 3 };

struct Driver {
#define X(result, member, name, signature) result(*member) signature = nullptr;
  MEMDEV_DOUBLE_FUNCTIONS(X)
#undef X
#define X(member, name, signature) int(*member) signature = nullptr;
  MEMDEV_DRIVER_FUNCTIONS(X)
#undef X
  int devices = 0;
  CUcontext contexts[kMostDevices] = {};

  // Returns an empty text, or the error.
  std::string Load(const char* path) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return dlerror();
#define X(member, name, signature)                                   \
  member = reinterpret_cast<decltype(member)>(dlsym(library, name)); \
  if (member == nullptr) return std::string(path) + " has no " + name;
    MEMDEV_DRIVER_FUNCTIONS(X)
#undef X
#define X(result, member, name, signature)                           \
  member = reinterpret_cast<decltype(member)>(dlsym(library, name)); \
  if (member == nullptr) return std::string(path) + " has no " + name;
    MEMDEV_DOUBLE_FUNCTIONS(X)
#undef X
    int error = cuInit(0);
    if (error == 0) error = cuDeviceGetCount(&devices);
    if (devices > kMostDevices) devices = kMostDevices;
    for (int i = 0; i < devices && error == 0; ++i) {
      int device = 0;
      error = cuDeviceGet(&device, i);
      if (error == 0) error = cuRetain(&contexts[i], device);
    }
    return error == 0 ? "" : "the driver says " + std::to_string(error);
  }
};

inline Driver driver;

inline void Check(int error, const char* what) { TORCH_CHECK(error == 0, "memdev: ", what, " returned ", error); }
#define MEMDEV_CHECK(call) ::memdev::Check(call, #call)

struct ThreadState {
  int device = 0;
  CUstream streams[kMostDevices] = {};  // NULL: the default stream
};
inline thread_local ThreadState thread_state;

// The NULL stream, events and memory belong to the thread's context, so it is made current before each call.
inline void UseDevice(int device) { MEMDEV_CHECK(driver.cuSetCurrent(driver.contexts[device])); }

inline CUstream CurrentStream(int device) { return thread_state.streams[device]; }
inline CUstream Native(const c10::Stream& stream) { return reinterpret_cast<CUstream>(stream.id()); }
inline c10::Stream Wrap(CUstream stream, int device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device)),
                     static_cast<c10::StreamId>(reinterpret_cast<intptr_t>(stream)));
}

inline void SynchronizeStream(int device, CUstream stream) {
  UseDevice(device);
  MEMDEV_CHECK(driver.cuStreamSynchronize(stream));
}

inline std::atomic<int> captures{0};  // under way: without any, nobody is asked

inline bool IsCapturing(int device, CUstream stream) {
  if (captures.load() == 0) return false;
  UseDevice(device);
  int status = 0;
  MEMDEV_CHECK(driver.cuStreamIsCapturing(stream, &status));
  return status != 0;
}

// `waiter` holds its later work until the work that is queued on `stream` now has ended.
inline void StreamWaits(int waiter_device, CUstream waiter, int device, CUstream stream) {
  if (waiter == stream && waiter_device == device) return;
  CUevent event = nullptr;
  UseDevice(device);
  MEMDEV_CHECK(driver.cuEventCreate(&event, 0));
  MEMDEV_CHECK(driver.cuEventRecord(event, stream));
  UseDevice(waiter_device);
  MEMDEV_CHECK(driver.cuStreamWaitEvent(waiter, event, 0));
  MEMDEV_CHECK(driver.cuEventDestroy(event));  // freed when it has passed
}

// Work that a stream runs when its turn comes. It may own host memory, never device memory: a kernel does not keep its
// inputs alive.
struct Work {
  virtual ~Work() = default;
  virtual void Run() = 0;
  virtual std::string Name() const = 0;
  // The engine of a device that runs it: by default none, as for the double's own work.
  virtual int Engine() const { return kNoEngine; }
  virtual uint64_t Bytes() const { return 0; }
  virtual double Operations() const { return 0; }  // of `Arithmetic`
  virtual const char* Arithmetic() const { return "flops.float32"; }
  virtual bool IsOp() const { return false; }    // of torch: the host takes time for it
  virtual bool IsHollow() const { return false; }  // it takes its time and does nothing
  bool captured = false;  // into a graph, which runs it again and again, and lives as long as the process
};

// Finished work waits here for the next kernel launch: its end may free host tensors, which may need the GIL, and a
// thread of the driver must never wait for the GIL (somebody may hold it and wait for the stream).
struct Graveyard {
  std::mutex mutex;
  std::vector<std::unique_ptr<Work>> dead;

  void Bury(Work* work) {
    std::lock_guard<std::mutex> lock(mutex);
    dead.emplace_back(work);
  }
  void Empty() {
    std::vector<std::unique_ptr<Work>> now;
    {
      std::lock_guard<std::mutex> lock(mutex);
      now.swap(dead);
    }
  }
};
inline Graveyard& graveyard = *new Graveyard;  // never destroyed: streams may outlive static objects

inline std::atomic<uint64_t> launches{0};
inline std::atomic<bool> timed{false};   // the double has virtual time
inline std::atomic<bool> hollow{false};  // and its kernels do nothing
inline std::atomic<bool> closing{false};  // the interpreter ends: no work is queued

// In a fresh thread's dispatch state, without autograd and without the program's modes: work may run in any thread, the
// program's included, while that holds locks which the owner of the GIL waits for. Some meta kernels are in Python, too.
struct PlainDispatch {
  PlainDispatch() : saved(at::impl::PythonTorchFunctionTLS::get_disabled_state()) {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::ALL_DISABLED);
  }
  ~PlainDispatch() { at::impl::PythonTorchFunctionTLS::set_disabled_state(saved); }
  at::impl::TorchFunctionDisabledState saved;
  c10::impl::ForceDispatchKeyGuard guard{
      c10::default_included_set - c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView),
      c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::python_ks};
};

inline void RunWork(void* raw) {
  Work* work = static_cast<Work*>(raw);
  try {
    const PlainDispatch plain;
    const at::DisableRecordFunctionGuard unobserved;  // a kernel is no op
    if (!work->IsHollow()) work->Run();
  } catch (const std::exception& error) {
    // There is no caller to throw it to: the program is far ahead. A GPU would report it at the next synchronisation.
    std::fprintf(stderr, "memdev: %s failed when its stream reached it: %s\n", work->Name().c_str(), error.what());
    std::fflush(stderr);
    std::abort();
  }
  if (!work->captured) graveyard.Bury(work);
}

// Tells the double how long the work takes: that is the longer of its bytes and its arithmetic.
inline void TellCost(const Work& work) {
  const auto at_rate = [](double amount, const char* name) {
    const double rate = driver.figure(name);
    return rate > 0 ? amount / rate : 0;
  };
  double seconds = 0;
  const auto bytes = static_cast<double>(work.Bytes());
  if (work.Engine() == kCompute) {
    seconds = driver.figure("kernel") + std::max(at_rate(bytes, "memory"), at_rate(work.Operations(), work.Arithmetic()));
  } else if (work.Engine() != kNoEngine) {
    seconds = driver.figure("copy_latency") + at_rate(bytes, work.Engine() == kOut ? "out" : "in");
  }
  driver.next_work(work.Engine(), seconds, work.IsOp() ? driver.figure("op") : 0, work.Bytes(), work.Name().c_str());
}

inline void Launch(int device, CUstream stream, std::unique_ptr<Work> work) {
  if (closing.load()) return;
  UseDevice(device);
  if (timed.load()) TellCost(*work);
  launches.fetch_add(1);
  work->captured = IsCapturing(device, stream);
  MEMDEV_CHECK(driver.cuLaunchHostFunc(stream, RunWork, work.get()));
  work.release();  // it may have ended already
}

}  // namespace memdev
