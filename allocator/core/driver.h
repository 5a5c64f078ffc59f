// The driver library of the accelerator: the entry points that memmgr uses, in one table that is filled by dlopen and
// dlsym, so that the core builds and loads anywhere. Names are the driver's without `cu` and version suffix.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "memmgr/device.h"

// ---- the driver's types, as in cuda.h --------------------------------------------------------------------------

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUstream = mm_stream;
using CUevent = struct CUevent_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUmemGenericAllocationHandle = unsigned long long;

enum : int {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NOT_INITIALIZED = 3,
  CUDA_ERROR_DEINITIALIZED = 4,
  CUDA_ERROR_NO_DEVICE = 100,
  CUDA_ERROR_INVALID_DEVICE = 101,
  CUDA_ERROR_INVALID_CONTEXT = 201,
  CUDA_ERROR_INVALID_HANDLE = 400,
  CUDA_ERROR_NOT_READY = 600,
  CUDA_ERROR_ILLEGAL_ADDRESS = 700,
  CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
  CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
  CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
  CUDA_ERROR_NOT_PERMITTED = 800,
  CUDA_ERROR_NOT_SUPPORTED = 801,
  CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
  CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
};
enum : unsigned { CU_STREAM_DEFAULT = 0, CU_STREAM_NON_BLOCKING = 1 };
enum : unsigned { CU_EVENT_DEFAULT = 0, CU_EVENT_DISABLE_TIMING = 2 };
enum : int { CU_DEVICE_ATTRIBUTE_INTEGRATED = 18 };
enum : int { CU_MEM_LOCATION_TYPE_DEVICE = 1 };
enum : int { CU_MEM_ALLOCATION_TYPE_PINNED = 1 };
enum : int { CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3 };
enum : int { CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1 };
enum : int { CU_STREAM_CAPTURE_MODE_GLOBAL = 0, CU_STREAM_CAPTURE_MODE_RELAXED = 2 };
enum : int { CU_STREAM_CAPTURE_STATUS_NONE = 0, CU_STREAM_CAPTURE_STATUS_ACTIVE = 1 };

struct CUmemLocation {
  int type;
  int id;
};
struct CUmemAllocationProp {
  int type;
  int requestedHandleTypes;
  CUmemLocation location;
  void* win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
};
struct CUmemAccessDesc {
  CUmemLocation location;
  int flags;
};
static_assert(sizeof(CUmemLocation) == 8);
static_assert(sizeof(CUmemAllocationProp) == 32 && offsetof(CUmemAllocationProp, allocFlags) == 24);
static_assert(sizeof(CUmemAccessDesc) == 12);
static_assert(sizeof(CUdeviceptr) == 8 && sizeof(CUmemGenericAllocationHandle) == 8);

// ---- the table -------------------------------------------------------------------------------------------------

// X(member, exported name, arguments). Version suffixes where cuda.h maps the plain name to them.
#define MEMMGR_DRIVER_CALLS(X)                                                                                        \
  X(Init, "cuInit", (unsigned flags))                                                                                 \
  X(GetErrorString, "cuGetErrorString", (CUresult, const char**))                                                     \
  X(DeviceGet, "cuDeviceGet", (CUdevice*, int ordinal))                                                               \
  X(DeviceGetAttribute, "cuDeviceGetAttribute", (int*, int attribute, CUdevice))                                      \
  X(DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CUcontext*, CUdevice))                                       \
  X(CtxGetCurrent, "cuCtxGetCurrent", (CUcontext*))                                                                   \
  X(CtxSetCurrent, "cuCtxSetCurrent", (CUcontext))                                                                    \
  X(CtxSynchronize, "cuCtxSynchronize", ())                                                                           \
  X(MemGetInfo, "cuMemGetInfo_v2", (size_t* free_bytes, size_t* total_bytes))                                         \
  X(MemAlloc, "cuMemAlloc_v2", (CUdeviceptr*, size_t))                                                                \
  X(MemFree, "cuMemFree_v2", (CUdeviceptr))                                                                           \
  X(MemAddressReserve, "cuMemAddressReserve",                                                                         \
    (CUdeviceptr*, size_t bytes, size_t alignment, CUdeviceptr hint, unsigned long long flags))                       \
  X(MemAddressFree, "cuMemAddressFree", (CUdeviceptr, size_t))                                                        \
  X(MemCreate, "cuMemCreate",                                                                                         \
    (CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*, unsigned long long flags))                    \
  X(MemRelease, "cuMemRelease", (CUmemGenericAllocationHandle))                                                       \
  X(MemMap, "cuMemMap", (CUdeviceptr, size_t, size_t offset, CUmemGenericAllocationHandle, unsigned long long flags)) \
  X(MemUnmap, "cuMemUnmap", (CUdeviceptr, size_t))                                                                    \
  X(MemSetAccess, "cuMemSetAccess", (CUdeviceptr, size_t, const CUmemAccessDesc*, size_t count))                      \
  X(MemGetAllocationGranularity, "cuMemGetAllocationGranularity", (size_t*, const CUmemAllocationProp*, int))         \
  X(MemHostAlloc, "cuMemHostAlloc", (void**, size_t, unsigned flags))                                                 \
  X(MemFreeHost, "cuMemFreeHost", (void*))                                                                            \
  X(MemHostRegister, "cuMemHostRegister_v2", (void*, size_t, unsigned flags))                                         \
  X(MemHostUnregister, "cuMemHostUnregister", (void*))                                                                \
  X(MemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", (CUdeviceptr to, const void* from, size_t, CUstream))                    \
  X(MemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", (void* to, CUdeviceptr from, size_t, CUstream))                          \
  X(MemcpyAsync, "cuMemcpyAsync", (CUdeviceptr to, CUdeviceptr from, size_t, CUstream))                               \
  X(StreamCreate, "cuStreamCreate", (CUstream*, unsigned flags))                                                      \
  X(StreamDestroy, "cuStreamDestroy_v2", (CUstream))                                                                  \
  X(StreamWaitEvent, "cuStreamWaitEvent", (CUstream, CUevent, unsigned flags))                                        \
  X(StreamSynchronize, "cuStreamSynchronize", (CUstream))                                                             \
  X(StreamQuery, "cuStreamQuery", (CUstream))                                                                         \
  X(StreamIsCapturing, "cuStreamIsCapturing", (CUstream, int* status))                                                \
  X(ThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", (int* mode))                                \
  X(EventCreate, "cuEventCreate", (CUevent*, unsigned flags))                                                         \
  X(EventRecord, "cuEventRecord", (CUevent, CUstream))                                                                \
  X(EventQuery, "cuEventQuery", (CUevent))                                                                            \
  X(EventSynchronize, "cuEventSynchronize", (CUevent))                                                                \
  X(EventElapsedTime, "cuEventElapsedTime", (float* milliseconds, CUevent start, CUevent end))                        \
  X(EventDestroy, "cuEventDestroy_v2", (CUevent))

// A driver without one of these is used all the same; the member is NULL then.
#define MEMMGR_OPTIONAL_DRIVER_CALLS(X)                                                                           \
  X(ModuleLoadData, "cuModuleLoadData", (CUmodule*, const void* image))                                           \
  X(ModuleUnload, "cuModuleUnload", (CUmodule))                                                                   \
  X(ModuleGetFunction, "cuModuleGetFunction", (CUfunction*, CUmodule, const char* name))                          \
  X(LaunchKernel, "cuLaunchKernel",                                                                               \
    (CUfunction, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z, unsigned threads_x, unsigned threads_y, \
     unsigned threads_z, unsigned shared_bytes, CUstream, void** arguments, void** extra))

struct mm_driver {
#define MEMMGR_DECLARE(member, name, arguments) CUresult(*member) arguments = nullptr;
  MEMMGR_DRIVER_CALLS(MEMMGR_DECLARE)
  MEMMGR_OPTIONAL_DRIVER_CALLS(MEMMGR_DECLARE)
#undef MEMMGR_DECLARE

  static constexpr int kMaxDevices = 64;
  // The device's primary context, retained at its first use and then kept: torch's runtime does the same.
  CUresult PrimaryContext(int ordinal, CUcontext* out) const;

 private:
  mutable std::atomic<CUcontext> primary_[kMaxDevices] = {};
};

namespace memmgr {

// The driver's text for an error, with its number.
std::string DriverText(const mm_driver& driver, CUresult error);
// 0, or the negative errno that fits best.
int DriverErrno(CUresult error);

// While this lives the device's primary context is the calling thread's; afterwards the former one is, also none. A
// thread that has not used CUDA yet would otherwise stay on this device, because the runtime goes by the context: its
// cudaGetDevice would return it, and the program's next tensor would be allocated there.
class EnsureContext {
 public:
  [[nodiscard]] EnsureContext(const mm_driver& driver, int ordinal);
  ~EnsureContext();
  EnsureContext(const EnsureContext&) = delete;
  EnsureContext& operator=(const EnsureContext&) = delete;
  CUresult error() const { return error_; }

 private:
  const mm_driver& driver_;
  CUcontext before_ = nullptr;  // to go back to
  bool changed_ = false;
  CUresult error_ = CUDA_SUCCESS;
};

}  // namespace memmgr
