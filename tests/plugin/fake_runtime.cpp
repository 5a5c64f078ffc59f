// A CUDA runtime over the double of the driver, to be preloaded into a torch that was built with CUDA, on a machine
// without a GPU: tensors live, streams and events work, copies copy, kernels do nothing. Built twice: as the runtime,
// and with FAKE_LIBCUDA as the few functions of libcuda that torch itself calls.
#ifdef FAKE_LIBCUDA
#include <stddef.h>

extern "C" {
int cuDevicePrimaryCtxGetState(int, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return 0;
}

// For Triton and torch's launcher of its kernels, which are loaded and launched, and do nothing. The other functions are
// those of the driver's double.
static unsigned long launches = 0;
unsigned long fake_triton_launches() { return launches; }
int cuModuleLoad(void **module, const char *) {
  *module = &launches;
  return 0;
}
int cuModuleLoadData(void **module, const void *) { return cuModuleLoad(module, nullptr); }
int cuModuleUnload(void *) { return 0; }
int cuModuleGetFunction(void **function, void *, const char *) {
  *function = &launches;
  return 0;
}
int cuFuncGetAttribute(int *value, int attribute, void *) {
  *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0;  // threads of a block, registers
  return 0;
}
int cuFuncSetAttribute(void *, int, int) { return 0; }
int cuFuncSetCacheConfig(void *, int) { return 0; }
int cuCtxGetLimit(size_t *value, int) {
  *value = 0;
  return 0;
}
int cuCtxSetLimit(int, size_t) { return 0; }
int cuPointerGetAttribute(void *data, int, unsigned long long pointer) {
  *static_cast<unsigned long long *>(data) = pointer;
  return 0;
}
int cuGetErrorName(int, const char **name) {
  *name = "an error";
  return 0;
}
// An H100's.
int cuDeviceGetAttribute(int *value, int attribute, int) {
  switch (attribute) {
    case 8: *value = 48 << 10; break;    // shared memory of a block
    case 10: *value = 32; break;         // a warp
    case 12: *value = 64 << 10; break;   // registers of a block
    case 16: *value = 132; break;        // multiprocessors
    case 75: *value = 9; break;          // compute capability
    case 76: *value = 0; break;
    case 97: *value = 227 << 10; break;  // shared memory that a block may ask for
    default: *value = 1;
  }
  return 0;
}
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                   void **) {
  ++launches;
  return 0;
}
int cuLaunchKernelEx(const void *, void *, void **, void **) {
  ++launches;
  return 0;
}
}
#else
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdlib.h>

#include <cstdio>
#include <cstring>

#undef cudaGetDeviceProperties

namespace {

template <typename... Arguments>
cudaError_t Driver(const char *name, Arguments... arguments) {
  static void *library = dlopen(getenv("MEMMGR_DRIVER"), RTLD_NOW | RTLD_LOCAL);
  return static_cast<cudaError_t>(reinterpret_cast<int (*)(Arguments...)>(
      dlsym(library, name))(arguments...));
}

// The calling thread has the device's context.
void Begin() {
  static thread_local bool begun = false;
  if (begun)
    return;
  begun = true;
  void *context = nullptr;
  Driver("cuInit", 0u);
  Driver("cuDevicePrimaryCtxRetain", &context, 0);
  Driver("cuCtxSetCurrent", context);
}

thread_local int current = 0;

} // namespace

#define IN_DRIVER(...)                                                         \
  {                                                                            \
    Begin();                                                                   \
    return Driver(__VA_ARGS__);                                                \
  }

extern "C" {

cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int *device) {
  return *device = current, cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return current = device, cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) {
  return *version = 13000, cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : 1024;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *out, int) {
  std::memset(out, 0, sizeof *out);
  std::strcpy(out->name, "double");
  const char *memory = getenv("FAKE_RUNTIME_MEMORY");
  out->totalGlobalMem =
      memory ? strtoull(memory, nullptr, 10) : size_t{1} << 30;
  out->major = 9;
  out->multiProcessorCount = 8;
  out->maxThreadsPerMultiProcessor = 2048;
  out->maxThreadsPerBlock = out->maxThreadsDim[0] = out->maxThreadsDim[1] =
      1024;
  out->maxThreadsDim[2] = 64;
  out->maxGridSize[0] = 2147483647;
  out->maxGridSize[1] = out->maxGridSize[2] = 65535;
  out->warpSize = out->maxBlocksPerMultiProcessor = 32;
  out->sharedMemPerBlock = 48 << 10;
  out->sharedMemPerBlockOptin = 227 << 10;
  out->sharedMemPerMultiprocessor = 200 << 10;
  out->regsPerBlock = out->regsPerMultiprocessor = 64 << 10;
  out->l2CacheSize = 32 << 20;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *available, size_t *total)
    IN_DRIVER("cuMemGetInfo_v2", available, total);
cudaError_t cudaDeviceSynchronize() IN_DRIVER("cuCtxSynchronize");

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int)
    IN_DRIVER("cuStreamCreate", stream, 1u);
cudaError_t cudaStreamSynchronize(cudaStream_t stream)
    IN_DRIVER("cuStreamSynchronize", stream);
cudaError_t cudaStreamQuery(cudaStream_t stream)
    IN_DRIVER("cuStreamQuery", stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event,
                                unsigned)
    IN_DRIVER("cuStreamWaitEvent", stream, event, 0u);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream,
                                  cudaStreamCaptureStatus *status)
    IN_DRIVER("cuStreamIsCapturing", stream, reinterpret_cast<int *>(status));
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode)
    IN_DRIVER("cuThreadExchangeStreamCaptureMode",
              reinterpret_cast<int *>(mode));
int FakeCapture(void *, int *status, unsigned long long *id, void *, void *,
                void *, void *) __asm__("cudaStreamGetCaptureInfo");
int FakeCapture(void *stream, int *status, unsigned long long *id, void *,
                void *, void *, void *) {
  if (id)
    *id = reinterpret_cast<unsigned long long>(stream);
  IN_DRIVER("cuStreamIsCapturing", stream, status);
}
// A graph is the stream that it was captured on: of each the last one counts.
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  return Driver("fake_set_capturing", stream, 1), cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  *graph = reinterpret_cast<cudaGraph_t>(stream);
  return Driver("fake_set_capturing", stream, 0), cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t *, size_t *count) {
  return *count = 1, cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph,
                                 unsigned long long) {
  return *exec = reinterpret_cast<cudaGraphExec_t>(graph), cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec,
                                          cudaGraph_t graph,
                                          unsigned long long) {
  return *exec = reinterpret_cast<cudaGraphExec_t>(graph), cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  return Driver("fake_replay", exec, stream), cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }

// Functions that torch's own allocators call.
cudaError_t cudaMalloc(void **p, size_t bytes)
    IN_DRIVER("cuMemAlloc_v2", p, bytes);
// The runtime waits for all work before it gives memory back, and torch's own allocator relies on it.
cudaError_t cudaFree(void *p) {
  Begin();
  Driver("cuCtxSynchronize");
  return Driver("cuMemFree_v2", p);
}
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags)
    IN_DRIVER("cuMemHostAlloc", p, bytes, flags);
cudaError_t cudaFreeHost(void *p) IN_DRIVER("cuMemFreeHost", p);

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
    IN_DRIVER("cuEventCreate", event, flags &cudaEventDisableTiming);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
    IN_DRIVER("cuEventRecord", event, stream);
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream,
                                     unsigned)
    IN_DRIVER("cuEventRecord", event, stream);
cudaError_t cudaEventQuery(cudaEvent_t event) IN_DRIVER("cuEventQuery", event);
cudaError_t cudaEventSynchronize(cudaEvent_t event)
    IN_DRIVER("cuEventSynchronize", event);
cudaError_t cudaEventDestroy(cudaEvent_t event)
    IN_DRIVER("cuEventDestroy_v2", event);

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes,
                            cudaMemcpyKind, cudaStream_t stream) {
  auto status = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(stream, &status);
  if (status != cudaStreamCaptureStatusNone)
    return Driver("cuMemcpyAsync", to, from, bytes, stream);
  cudaStreamSynchronize(stream);
  return std::memcpy(to, from, bytes), cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes,
                       cudaMemcpyKind) {
  cudaDeviceSynchronize();
  return std::memcpy(to, from, bytes), cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes,
                            cudaStream_t stream) {
  auto status = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(stream, &status);
  if (status != cudaStreamCaptureStatusNone)
    return cudaSuccess; // as a kernel
  cudaStreamSynchronize(stream);
  return std::memset(to, value, bytes), cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *out,
                                     const void *p) {
  std::memset(out, 0, sizeof *out);
  out->devicePointer = out->hostPointer = const_cast<void *>(p);
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *, dim3, dim3, void **, size_t,
                             cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *,
                                void **) {
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) {
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *out, const void *) {
  std::memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024;
  out->binaryVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks,
                                                                   const void *,
                                                                   int, size_t,
                                                                   unsigned) {
  return *blocks = 2, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks,
                                                          const void *, int,
                                                          size_t) {
  return *blocks = 2, cudaSuccess;
}

// torch finds some of the driver's functions through the runtime. A function that the double lacks fails when it is
// called.
cudaError_t
cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned,
                                 unsigned long long,
                                 cudaDriverEntryPointQueryResult *result) {
  static void *library = dlopen("libcuda.so.1", RTLD_NOW);
  char second[128];
  std::snprintf(second, sizeof second, "%s_v2", name);
  *out = dlsym(library, name);
  if (!*out)
    *out = dlsym(library, second);
  if (!*out)
    *out = reinterpret_cast<void *>(+[] { return 801; });
  if (result)
    *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
}
#endif
