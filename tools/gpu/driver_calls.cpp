// Measures the cost of the driver's calls on a real device, without CUDA headers and without torch. It prints one JSON
// object per line: {"name", "value", "unit", "detail"}, or "error" or "skipped" instead of the value.
//
//   g++ -std=c++17 -O2 -Wall -Wextra tools/gpu/driver_calls.cpp -o driver_calls -ldl -lpthread
//   ./driver_calls [--seconds=15] [section ...]     sections: system host pages beside locking link large
//
// Environment: MEMMGR_DRIVER is the driver's library (default libcuda.so.1). MEMMGR_KERNELS is a cubin of kernels.cu,
// loaded if the driver cannot compile the PTX text. Exit codes: 0 done, 1 no driver or device, 2 the context was lost,
// 3 out of time, 4 crash.
//
// A failing call ends its own figure only. A section that leaves the context unusable is followed by a restart of the
// program with the sections that remain. A watchdog ends the program after the time of `--seconds`.
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

// ---- the driver's types and calls, as in cuda.h 13.0 -----------------------------------------------------------

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUmemGenericAllocationHandle = unsigned long long;

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

constexpr CUresult kSuccess = 0, kNotReady = 600;
constexpr unsigned kNonBlocking = 1, kNoTiming = 2, kPortable = 1;
constexpr int kCaptureRelaxed = 2;

// X(member, exported name, arguments). Enumerations of cuda.h are int here.
#define DRIVER_CALLS(X)                                                                                              \
  X(Init, "cuInit", (unsigned))                                                                                      \
  X(DriverGetVersion, "cuDriverGetVersion", (int*))                                                                  \
  X(GetErrorName, "cuGetErrorName", (CUresult, const char**))                                                        \
  X(DeviceGet, "cuDeviceGet", (CUdevice*, int))                                                                      \
  X(DeviceGetName, "cuDeviceGetName", (char*, int, CUdevice))                                                        \
  X(DeviceGetPCIBusId, "cuDeviceGetPCIBusId", (char*, int, CUdevice))                                                \
  X(DeviceGetAttribute, "cuDeviceGetAttribute", (int*, int, CUdevice))                                               \
  X(DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CUcontext*, CUdevice))                                      \
  X(CtxGetCurrent, "cuCtxGetCurrent", (CUcontext*))                                                                  \
  X(CtxSetCurrent, "cuCtxSetCurrent", (CUcontext))                                                                   \
  X(CtxSynchronize, "cuCtxSynchronize", ())                                                                          \
  X(ModuleLoadData, "cuModuleLoadData", (CUmodule*, const void*))                                                    \
  X(ModuleGetFunction, "cuModuleGetFunction", (CUfunction*, CUmodule, const char*))                                  \
  X(LaunchKernel, "cuLaunchKernel",                                                                                  \
    (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void**, void**))    \
  X(MemGetInfo, "cuMemGetInfo_v2", (size_t*, size_t*))                                                               \
  X(MemAlloc, "cuMemAlloc_v2", (CUdeviceptr*, size_t))                                                               \
  X(MemFree, "cuMemFree_v2", (CUdeviceptr))                                                                          \
  X(MemsetD32Async, "cuMemsetD32Async", (CUdeviceptr, unsigned, size_t, CUstream))                                   \
  X(MemAddressReserve, "cuMemAddressReserve", (CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long))       \
  X(MemAddressFree, "cuMemAddressFree", (CUdeviceptr, size_t))                                                       \
  X(MemCreate, "cuMemCreate",                                                                                        \
    (CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*, unsigned long long))                         \
  X(MemRelease, "cuMemRelease", (CUmemGenericAllocationHandle))                                                      \
  X(MemMap, "cuMemMap", (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long))             \
  X(MemUnmap, "cuMemUnmap", (CUdeviceptr, size_t))                                                                   \
  X(MemSetAccess, "cuMemSetAccess", (CUdeviceptr, size_t, const CUmemAccessDesc*, size_t))                           \
  X(MemGetAllocationGranularity, "cuMemGetAllocationGranularity", (size_t*, const CUmemAllocationProp*, int))        \
  X(MemHostAlloc, "cuMemHostAlloc", (void**, size_t, unsigned))                                                      \
  X(MemFreeHost, "cuMemFreeHost", (void*))                                                                           \
  X(MemHostRegister, "cuMemHostRegister_v2", (void*, size_t, unsigned))                                              \
  X(MemHostUnregister, "cuMemHostUnregister", (void*))                                                               \
  X(MemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", (CUdeviceptr, const void*, size_t, CUstream))                           \
  X(MemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", (void*, CUdeviceptr, size_t, CUstream))                                 \
  X(MemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2", (CUdeviceptr, CUdeviceptr, size_t, CUstream))                           \
  X(StreamCreate, "cuStreamCreate", (CUstream*, unsigned))                                                           \
  X(StreamDestroy, "cuStreamDestroy_v2", (CUstream))                                                                 \
  X(StreamWaitEvent, "cuStreamWaitEvent", (CUstream, CUevent, unsigned))                                             \
  X(StreamSynchronize, "cuStreamSynchronize", (CUstream))                                                            \
  X(StreamQuery, "cuStreamQuery", (CUstream))                                                                        \
  X(StreamIsCapturing, "cuStreamIsCapturing", (CUstream, int*))                                                      \
  X(ThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", (int*))                                    \
  X(EventCreate, "cuEventCreate", (CUevent*, unsigned))                                                              \
  X(EventRecord, "cuEventRecord", (CUevent, CUstream))                                                               \
  X(EventQuery, "cuEventQuery", (CUevent))                                                                           \
  X(EventSynchronize, "cuEventSynchronize", (CUevent))                                                               \
  X(EventElapsedTime, "cuEventElapsedTime", (float*, CUevent, CUevent))                                              \
  X(EventDestroy, "cuEventDestroy_v2", (CUevent))

// ---- calling, with errors that name the call -------------------------------------------------------------------

std::atomic<const char*> current_call{"none"};
std::atomic<const char*> current_figure{"none"};

std::string ErrorText(const char* call, CUresult code);

struct Failed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class Signature>
struct Call;
template <class... Arguments>
struct Call<CUresult(Arguments...)> {
  using Function = CUresult(Arguments...);
  const char* name;
  Function* function = nullptr;
  // Returns the driver's result.
  CUresult Code(Arguments... arguments) const {
    if (function == nullptr) throw Failed(std::string(name) + ": the driver does not export it");
    current_call.store(name, std::memory_order_relaxed);
    return function(arguments...);
  }
  // Throws `Failed` on any code but success.
  void operator()(Arguments... arguments) const {
    const CUresult code = Code(arguments...);
    if (code != kSuccess) throw Failed(ErrorText(name, code));
  }
};

struct Driver {
#define DECLARE(member, name, arguments) Call<CUresult arguments> member{name};
  DRIVER_CALLS(DECLARE)
#undef DECLARE
  void Load(void* library) {
#define LOAD(member, name, arguments) \
  member.function = reinterpret_cast<decltype(member)::Function*>(dlsym(library, name));
    DRIVER_CALLS(LOAD)
#undef LOAD
  }
} cu;

std::string ErrorText(const char* call, CUresult code) {
  const char* name = nullptr;
  if (cu.GetErrorName.function != nullptr) cu.GetErrorName.function(code, &name);
  return std::string(call) + ": " + std::to_string(code) + " (" + (name != nullptr ? name : "no name") + ")";
}

// ---- output ----------------------------------------------------------------------------------------------------

constexpr size_t kMiB = size_t{1} << 20, kGiB = size_t{1} << 30;

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string Quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 32 ? ' ' : c;
  }
  return out + '"';
}

std::string Number(double value) {
  if (!std::isfinite(value)) return "null";
  char text[40];
  snprintf(text, sizeof text, std::fabs(value) >= 1e6 && value == std::floor(value) ? "%.0f" : "%.6g", value);
  return text;
}

// The fields of a JSON object, in order.
class Json {
 public:
  Json& Raw(const std::string& key, const std::string& value) {
    text_ += (text_.empty() ? "" : ", ") + Quoted(key) + ": " + value;
    return *this;
  }
  Json& Add(const std::string& key, double value) { return Raw(key, Number(value)); }
  Json& Add(const std::string& key, const std::string& value) { return Raw(key, Quoted(value)); }
  Json& Add(const std::string& key, const char* value) { return Raw(key, Quoted(value)); }
  Json& Flag(const std::string& key, bool value) { return Raw(key, value ? "true" : "false"); }
  std::string Text() const { return "{" + text_ + "}"; }

 private:
  std::string text_;
};

void Print(const Json& line) {
  const std::string text = line.Text() + "\n";
  fwrite(text.data(), 1, text.size(), stdout);
  fflush(stdout);
}

void Emit(const std::string& name, double value, const char* unit, const Json& detail = {}) {
  Print(Json().Add("name", name).Add("value", value).Add("unit", unit).Raw("detail", detail.Text()));
}

// ---- sections and figures --------------------------------------------------------------------------------------

double end_of_run = 0, end_of_section = 0;

template <class Act>
void Figure(const std::string& name, double estimate_seconds, Act act) {
  if (Now() + estimate_seconds > end_of_section) {
    Print(Json().Add("name", name).Add("skipped", "the time of its section would not suffice"));
    return;
  }
  current_figure.store(name.c_str());
  try {
    act();
  } catch (const std::exception& error) {
    Print(Json().Add("name", name).Add("error", error.what()));
  }
  current_figure.store("between figures");
}

struct Spread {
  double median, least, most;
};
Spread SpreadOf(std::vector<double> values) {
  if (values.empty()) return {NAN, NAN, NAN};
  std::sort(values.begin(), values.end());
  return {values[values.size() / 2], values.front(), values.back()};
}

// ---- shared by the sections ------------------------------------------------------------------------------------

// Made by: nvcc 13.0 -ptx -arch=compute_80 tools/gpu/kernels.cu; the text between the quotes is its output, unchanged.
const char kKernels[] = R"PTX(//
// Generated by NVIDIA NVVM Compiler
//
// Compiler Build ID: CL-36424714
// Cuda compilation tools, release 13.0, V13.0.88
// Based on NVVM 7.0.1
//

.version 9.0
.target sm_80
.address_size 64

	// .globl	empty_kernel

.visible .entry empty_kernel()
{



	ret;

}
	// .globl	spin_kernel
.visible .entry spin_kernel(
	.param .u64 spin_kernel_param_0,
	.param .u32 spin_kernel_param_1,
	.param .u64 spin_kernel_param_2,
	.param .u64 spin_kernel_param_3
)
{
	.reg .pred 	%p<2>;
	.reg .b32 	%r<15>;
	.reg .b64 	%rd<15>;


	ld.param.u64 	%rd6, [spin_kernel_param_0];
	ld.param.u32 	%r5, [spin_kernel_param_1];
	ld.param.u64 	%rd7, [spin_kernel_param_2];
	ld.param.u64 	%rd4, [spin_kernel_param_3];
	cvta.to.global.u64 	%rd1, %rd7;
	mov.u32 	%r6, %ntid.x;
	mov.u32 	%r7, %ctaid.x;
	mov.u32 	%r8, %tid.x;
	mad.lo.s32 	%r1, %r7, %r6, %r8;
	mul.wide.u32 	%rd8, %r5, %r1;
	cvta.to.global.u64 	%rd9, %rd6;
	shl.b64 	%rd10, %rd8, 2;
	add.s64 	%rd2, %rd9, %rd10;
	// begin inline asm
	mov.u64 %rd5, %globaltimer;
	// end inline asm
	mov.u32 	%r14, 0;

$L__BB1_1:
	mov.u32 	%r2, %r14;
	ld.volatile.global.u32 	%r9, [%rd2];
	mad.lo.s32 	%r10, %r9, 1664525, 1013904223;
	st.volatile.global.u32 	[%rd2], %r10;
	add.s32 	%r14, %r2, 1;
	// begin inline asm
	mov.u64 %rd11, %globaltimer;
	// end inline asm
	sub.s64 	%rd12, %rd11, %rd5;
	setp.lt.u64 	%p1, %rd12, %rd4;
	@%p1 bra 	$L__BB1_1;

	shl.b32 	%r11, %r1, 1;
	mul.wide.u32 	%rd13, %r11, 4;
	add.s64 	%rd14, %rd1, %rd13;
	add.s32 	%r13, %r2, 1;
	st.global.u32 	[%rd14], %r13;
	ld.volatile.global.u32 	%r12, [%rd2];
	st.global.u32 	[%rd14+4], %r12;
	ret;

}
	// .globl	add_kernel
.visible .entry add_kernel(
	.param .u64 add_kernel_param_0,
	.param .u64 add_kernel_param_1,
	.param .u32 add_kernel_param_2,
	.param .u32 add_kernel_param_3
)
{
	.reg .pred 	%p<5>;
	.reg .b32 	%r<23>;
	.reg .b64 	%rd<13>;


	ld.param.u64 	%rd6, [add_kernel_param_0];
	ld.param.u64 	%rd7, [add_kernel_param_1];
	ld.param.u32 	%r3, [add_kernel_param_2];
	ld.param.u32 	%r4, [add_kernel_param_3];
	setp.eq.s32 	%p1, %r4, 0;
	@%p1 bra 	$L__BB2_6;

	mov.u32 	%r6, %ntid.x;
	mov.u32 	%r7, %ctaid.x;
	mul.wide.u32 	%rd8, %r7, %r6;
	mov.u32 	%r8, %tid.x;
	cvt.u64.u32 	%rd9, %r8;
	add.s64 	%rd1, %rd8, %rd9;
	mov.u32 	%r9, %nctaid.x;
	mul.wide.u32 	%rd2, %r9, %r6;
	cvta.to.global.u64 	%rd3, %rd6;
	mov.u32 	%r22, 0;

$L__BB2_2:
	setp.ge.u64 	%p2, %rd1, %rd7;
	@%p2 bra 	$L__BB2_5;

	mov.u64 	%rd12, %rd1;

$L__BB2_4:
	shl.b64 	%rd10, %rd12, 4;
	add.s64 	%rd11, %rd3, %rd10;
	ld.global.v4.u32 	{%r10, %r11, %r12, %r13}, [%rd11];
	add.s32 	%r18, %r13, %r3;
	add.s32 	%r19, %r12, %r3;
	add.s32 	%r20, %r11, %r3;
	add.s32 	%r21, %r10, %r3;
	st.global.v4.u32 	[%rd11], {%r21, %r20, %r19, %r18};
	add.s64 	%rd12, %rd12, %rd2;
	setp.lt.u64 	%p3, %rd12, %rd7;
	@%p3 bra 	$L__BB2_4;

$L__BB2_5:
	add.s32 	%r22, %r22, 1;
	setp.lt.u32 	%p4, %r22, %r4;
	@%p4 bra 	$L__BB2_2;

$L__BB2_6:
	ret;

}

)PTX";

constexpr unsigned kSpinThreads = 128, kSpinStride = 4096, kSeed = 12345;  // a stride of 16 KiB spreads over pages

struct Shared {
  CUdevice device = 0;
  CUcontext context = nullptr;
  unsigned processors = 132;
  CUmemAllocationProp properties{};
  CUmemAccessDesc access{};
  CUstream compute = nullptr, down = nullptr, up = nullptr;  // kernels, device to host, host to device
  CUfunction empty = nullptr, spin = nullptr, add = nullptr;
  CUdeviceptr spin_data = 0, spin_results = 0;
  std::string kernels_error;
} shared;

CUfunction Kernel(CUfunction function) {
  if (function == nullptr) throw Failed("no kernels: " + shared.kernels_error);
  return function;
}

// Gives resources back: a failure is ignored.
template <class Act>
void Try(Act act) {
  try {
    act();
  } catch (const Failed&) {
  }
}

// An event for one scope.
class Event {
 public:
  explicit Event(unsigned flags = kNoTiming) { cu.EventCreate(&event_, flags); }
  ~Event() {
    Try([this] { cu.EventDestroy(event_); });
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  operator CUevent() const { return event_; }
  bool Pending() const {
    const CUresult code = cu.EventQuery.Code(event_);
    if (code != kSuccess && code != kNotReady) throw Failed(ErrorText("cuEventQuery", code));
    return code == kNotReady;
  }

 private:
  CUevent event_ = nullptr;
};

double Milliseconds(CUevent begin, CUevent end) {
  float taken = NAN;
  cu.EventElapsedTime(&taken, begin, end);
  return taken;
}

// Device memory for one scope.
class DeviceMemory {
 public:
  explicit DeviceMemory(size_t bytes) { cu.MemAlloc(&address_, bytes); }
  ~DeviceMemory() {
    Try([this] { cu.MemFree(address_); });
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  operator CUdeviceptr() const { return address_; }

 private:
  CUdeviceptr address_ = 0;
};

// Memory of cuMemHostAlloc for one scope.
class LockedMemory {
 public:
  explicit LockedMemory(size_t bytes) { cu.MemHostAlloc(&memory_, bytes, kPortable); }
  ~LockedMemory() {
    Try([this] { cu.MemFreeHost(memory_); });
  }
  LockedMemory(const LockedMemory&) = delete;
  LockedMemory& operator=(const LockedMemory&) = delete;
  char* data() const { return static_cast<char*>(memory_); }

 private:
  void* memory_ = nullptr;
};

// Anonymous memory for one scope, aligned to 2 MiB, of huge pages where the kernel has them.
class HugeMemory {
 public:
  explicit HugeMemory(size_t bytes) : bytes_(bytes) {
    raw_ = mmap(nullptr, bytes + 2 * kMiB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw_ == MAP_FAILED) throw Failed(std::string("mmap: ") + strerror(errno));
    data_ = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(raw_) + 2 * kMiB - 1) / (2 * kMiB) * (2 * kMiB));
    huge_ = madvise(data_, bytes, MADV_HUGEPAGE) == 0;
  }
  ~HugeMemory() {
    for (void* piece : registered_) {
      Try([piece] { cu.MemHostUnregister(piece); });
    }
    munmap(raw_, bytes_ + 2 * kMiB);
  }
  HugeMemory(const HugeMemory&) = delete;
  HugeMemory& operator=(const HugeMemory&) = delete;
  char* data() const { return data_; }
  bool huge() const { return huge_; }

  // Writes one byte of each 4 KiB, each thread in a part of its own. Returns seconds.
  double Touch(unsigned threads) const {
    const double begun = Now();
    std::vector<std::thread> running;
    const size_t part = (bytes_ / threads + 2 * kMiB - 1) / (2 * kMiB) * (2 * kMiB);
    for (unsigned i = 0; i < threads; ++i) {
      running.emplace_back([this, part, i] {
        for (size_t at = i * part; at < std::min((i + 1) * part, bytes_); at += 4096) data_[at] = 1;
      });
    }
    for (std::thread& thread : running) thread.join();
    return Now() - begun;
  }
  // Page-locks a piece. Returns seconds.
  double Register(size_t offset, size_t bytes) {
    const double begun = Now();
    cu.MemHostRegister(data_ + offset, bytes, kPortable);
    const double taken = Now() - begun;
    registered_.push_back(data_ + offset);
    return taken;
  }
  // Unlocks all pieces. Returns seconds.
  double Unregister() {
    const double begun = Now();
    while (!registered_.empty()) {
      void* piece = registered_.back();
      registered_.pop_back();
      cu.MemHostUnregister(piece);
    }
    return Now() - begun;
  }
  void Registered(size_t offset) { registered_.push_back(data_ + offset); }

 private:
  size_t bytes_;
  void* raw_ = nullptr;
  char* data_ = nullptr;
  bool huge_ = false;
  std::vector<void*> registered_;
};

std::string FirstLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// A field of /proc/meminfo or of /proc/self/smaps_rollup in bytes; NaN: no such field.
double ProcBytes(const char* path, const std::string& field) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind(field + ":", 0) == 0) return 1024.0 * strtod(line.c_str() + field.size() + 1, nullptr);
  }
  return NAN;
}

void Launch(CUfunction function, unsigned blocks, unsigned threads, CUstream stream, void** parameters) {
  cu.LaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, nullptr);
}

// Starts a kernel on the compute stream that runs for this long. CheckSpin waits for it.
void StartSpin(double seconds) {
  const CUfunction kernel = Kernel(shared.spin);
  const unsigned threads = shared.processors * kSpinThreads;
  if (shared.spin_data == 0) {
    CUdeviceptr data = 0;
    cu.MemAlloc(&data, size_t{4} * kSpinStride * threads);
    cu.MemAlloc(&shared.spin_results, size_t{8} * threads);
    shared.spin_data = data;
  }
  cu.MemsetD32Async(shared.spin_data, kSeed, size_t{kSpinStride} * threads, shared.compute);
  cu.MemsetD32Async(shared.spin_results, 0, size_t{2} * threads, shared.compute);
  CUdeviceptr data = shared.spin_data, results = shared.spin_results;
  unsigned stride = kSpinStride;
  unsigned long long nanoseconds = static_cast<unsigned long long>(seconds * 1e9);
  void* parameters[] = {&data, &stride, &results, &nanoseconds};
  Launch(kernel, shared.processors, kSpinThreads, shared.compute, parameters);
}

// Waits for the kernel and compares its results with the generator's. Adds the findings to `detail`; returns the number
// of wrong words.
unsigned CheckSpin(Json& detail) {
  const unsigned threads = shared.processors * kSpinThreads;
  std::vector<unsigned> results(size_t{2} * threads);
  cu.MemcpyDtoHAsync(results.data(), shared.spin_results, size_t{8} * threads, shared.compute);
  cu.StreamSynchronize(shared.compute);
  unsigned wrong = 0, least = std::numeric_limits<unsigned>::max();
  for (unsigned i = 0; i < threads; ++i) {
    unsigned value = kSeed, factor = 1664525u, term = 1013904223u;
    for (unsigned left = results[2 * i]; left != 0; left >>= 1) {  // the step, squared again and again
      if (left & 1) value = value * factor + term;
      term = term * factor + term;
      factor *= factor;
    }
    wrong += value != results[2 * i + 1] || results[2 * i] == 0;
    least = std::min(least, results[2 * i]);
  }
  detail.Add("kernel_wrong_words", wrong).Add("kernel_words", threads).Add("kernel_least_rounds", least);
  return wrong;
}

// ---- 1: the driver and the device ------------------------------------------------------------------------------

bool Begin() {
  bool usable = false;
  Figure("begin.context", 0, [&] {
    const double begun = Now();
    cu.Init(0);
    const double inited = Now();
    cu.DeviceGet(&shared.device, 0);
    cu.DevicePrimaryCtxRetain(&shared.context, shared.device);
    cu.CtxSetCurrent(shared.context);
    const double retained = Now();
    cu.StreamCreate(&shared.compute, kNonBlocking);
    cu.StreamCreate(&shared.down, kNonBlocking);
    cu.StreamCreate(&shared.up, kNonBlocking);
    usable = true;
    Emit("begin.context", retained - begun, "s",
         Json()
             .Add("init_s", inited - begun)
             .Add("primary_context_s", retained - inited)
             .Add("three_streams_us", 1e6 * (Now() - retained)));
  });
  if (!usable) return false;
  shared.properties.type = 1;
  shared.properties.location = {1, shared.device};
  shared.access = {{1, shared.device}, 3};
  Figure("begin.driver", 0, [] {
    int version = 0;
    cu.DriverGetVersion(&version);
    char name[256] = "";
    if (cu.DeviceGetName.function != nullptr) cu.DeviceGetName(name, sizeof name - 1, shared.device);
    Emit("begin.driver", version, "CUDA version", Json().Add("device", name));
  });
  Figure("begin.attributes", 0, [] {
    const std::pair<const char*, int> wanted[] = {
        {"multiprocessors", 16},       {"integrated", 18},
        {"compute_mode", 20},          {"memory_clock_khz", 36},
        {"memory_bus_bits", 37},       {"l2_bytes", 38},
        {"copy_engines", 40},          {"unified_addressing", 41},
        {"capability_major", 75},      {"capability_minor", 76},
        {"pageable_access", 88},       {"concurrent_managed_access", 89},
        {"can_flush_writes", 98},      {"pageable_by_host_tables", 100},
        {"virtual_memory", 102},       {"rdma_with_virtual_memory", 110},
        {"registered_read_only", 113}, {"memory_pools", 115}};
    Json detail;
    double known = 0;
    for (const auto& [name, number] : wanted) {
      int value = 0;
      if (cu.DeviceGetAttribute.Code(&value, number, shared.device) != kSuccess) continue;
      detail.Add(name, value);
      known += 1;
      if (number == 16 && value > 0 && value <= 1024) shared.processors = static_cast<unsigned>(value);
    }
    Emit("begin.attributes", known, "attributes", detail);
  });
  Figure("begin.memory", 0, [] {
    size_t free_bytes = 0, total_bytes = 0;
    cu.MemGetInfo(&free_bytes, &total_bytes);
    Emit("begin.memory", static_cast<double>(free_bytes), "bytes free",
         Json().Add("total_bytes", static_cast<double>(total_bytes)));
  });
  Figure("begin.granularity", 0, [] {
    size_t least = 0, best = 0;
    cu.MemGetAllocationGranularity(&least, &shared.properties, 0);
    cu.MemGetAllocationGranularity(&best, &shared.properties, 1);
    Emit("begin.granularity", static_cast<double>(least), "bytes",
         Json().Add("recommended_bytes", static_cast<double>(best)));
  });
  shared.kernels_error = "the module was not loaded";
  Figure("begin.kernels", 0, [] {
    const double begun = Now();
    CUmodule module = nullptr;
    const CUresult code = cu.ModuleLoadData.Code(&module, kKernels);
    Json detail;
    detail.Add("from", "ptx");
    const char* path = getenv("MEMMGR_KERNELS");
    if (code != kSuccess) {
      shared.kernels_error = ErrorText("cuModuleLoadData", code);
      if (path == nullptr) throw Failed(shared.kernels_error);
      std::ifstream file(path, std::ios::binary);
      const std::string image((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
      if (image.empty()) throw Failed(shared.kernels_error + "; MEMMGR_KERNELS cannot be read");
      cu.ModuleLoadData(&module, image.data());
      detail = Json().Add("from", "cubin").Add("ptx_error", shared.kernels_error);
    }
    cu.ModuleGetFunction(&shared.empty, module, "empty_kernel");
    cu.ModuleGetFunction(&shared.spin, module, "spin_kernel");
    cu.ModuleGetFunction(&shared.add, module, "add_kernel");
    const double loaded = Now();
    Launch(shared.empty, 1, 1, shared.compute, nullptr);
    cu.StreamSynchronize(shared.compute);
    Emit("begin.kernels", loaded - begun, "s", detail.Add("first_launch_s", Now() - loaded));
  });
  return true;
}

// ---- 7: the machine, printed early because it costs nothing ----------------------------------------------------

void System() {
  Figure("system.machine", 0, [] {
    struct rlimit limit{};
    getrlimit(RLIMIT_MEMLOCK, &limit);
    struct utsname name{};
    uname(&name);
    const double unlimited = -1;
    Emit("system.machine", sysconf(_SC_NPROCESSORS_ONLN), "processors",
         Json()
             .Add("memory_available_bytes", ProcBytes("/proc/meminfo", "MemAvailable"))
             .Add("memory_total_bytes", ProcBytes("/proc/meminfo", "MemTotal"))
             .Add("memlock_bytes", limit.rlim_cur == RLIM_INFINITY ? unlimited : static_cast<double>(limit.rlim_cur))
             .Add("kernel", name.release)
             .Add("huge_pages", FirstLine("/sys/kernel/mm/transparent_hugepage/enabled"))
             .Add("huge_pages_defrag", FirstLine("/sys/kernel/mm/transparent_hugepage/defrag"))
             .Add("nodes", FirstLine("/sys/devices/system/node/online")));
  });
  Figure("system.link", 0, [] {
    char id[32] = "";
    cu.DeviceGetPCIBusId(id, sizeof id - 1, shared.device);
    std::string lower = id;
    for (char& c : lower) c = static_cast<char>(tolower(static_cast<unsigned char>(c)));
    const std::string folder = "/sys/bus/pci/devices/" + lower + "/";
    const std::string node = FirstLine(folder + "numa_node");
    Emit("system.link", node.empty() ? NAN : atof(node.c_str()), "numa node",
         Json()
             .Add("bus_id", lower)
             .Add("speed", FirstLine(folder + "current_link_speed"))
             .Add("width", FirstLine(folder + "current_link_width"))
             .Add("max_speed", FirstLine(folder + "max_link_speed"))
             .Add("max_width", FirstLine(folder + "max_link_width")));
  });
}

// ---- 2: host time of calls -------------------------------------------------------------------------------------

// Emits the nanoseconds of `act`: the median over batches of about a millisecond, `limit` calls at most. `after` runs
// behind each batch and is not timed.
template <class Act, class After>
void Cost(const std::string& name, int limit, Act act, After after, Json detail = {}) {
  const double started = Now();
  for (int i = 0; i < 4; ++i) act();
  after();
  double begun = Now();
  for (int i = 0; i < 8; ++i) act();
  const double each = (Now() - begun) / 8;
  after();
  const int batch = std::clamp(static_cast<int>(1e-3 / std::max(each, 1e-9)), std::min(8, limit), limit);
  std::vector<double> batches;
  while (batches.size() < 9 && (batches.size() < 3 || Now() - started < 0.05)) {
    begun = Now();
    for (int i = 0; i < batch; ++i) act();
    batches.push_back(1e9 * (Now() - begun) / batch);
    after();
  }
  const Spread spread = SpreadOf(batches);
  Emit(name, spread.median, "ns",
       detail.Add("least", spread.least).Add("most", spread.most).Add("calls", batch * double(batches.size())));
}

void HostCosts() {
  const auto nothing = [] {};
  const auto settle = [] { cu.CtxSynchronize(); };
  const auto idle = [&](const std::string& name, int limit, auto act, auto after) {
    Figure("host." + name, 0.03, [&] {
      cu.CtxSynchronize();
      Cost("host." + name, limit, act, after);
    });
  };
  Figure("host.event_query_done", 0.03, [&] {
    const Event event;
    cu.EventRecord(event, shared.down);
    cu.StreamSynchronize(shared.down);
    Cost("host.event_query_done", 4000, [&] { cu.EventQuery(event); }, nothing);
  });
  for (const unsigned flags : {kNoTiming, 0u}) {
    const std::string name = flags == 0 ? "host.event_record_timing" : "host.event_record";
    Figure(name, 0.03, [&] {
      const Event event(flags);
      Cost(name, 256, [&] { cu.EventRecord(event, shared.down); }, settle);
    });
  }
  Figure("host.stream_wait_event_done", 0.03, [&] {
    const Event event;
    cu.EventRecord(event, shared.up);
    cu.StreamSynchronize(shared.up);
    Cost("host.stream_wait_event_done", 256, [&] { cu.StreamWaitEvent(shared.down, event, 0); }, settle);
  });
  idle("stream_query_idle", 4000, [] { cu.StreamQuery(shared.down); }, nothing);
  int status = 0;
  idle("stream_is_capturing", 4000, [&] { cu.StreamIsCapturing(shared.down, &status); }, nothing);
  int mode = kCaptureRelaxed;
  idle("exchange_capture_mode", 4000, [&] { cu.ThreadExchangeStreamCaptureMode(&mode); }, nothing);
  if (mode != kCaptureRelaxed) Try([&] { cu.ThreadExchangeStreamCaptureMode(&mode); });
  CUcontext context = nullptr;
  idle("ctx_get_current", 4000, [&] { cu.CtxGetCurrent(&context); }, nothing);
  idle("ctx_set_current_same", 4000, [] { cu.CtxSetCurrent(shared.context); }, nothing);
  idle(
      "ctx_set_current_none_and_back", 4000,
      [] {
        cu.CtxSetCurrent(nullptr);
        cu.CtxSetCurrent(shared.context);
      },
      nothing);
  size_t free_bytes = 0, total_bytes = 0;
  idle("mem_get_info", 1000, [&] { cu.MemGetInfo(&free_bytes, &total_bytes); }, nothing);
  Figure("host.event_elapsed_time", 0.03, [&] {
    const Event begin(0), end(0);
    cu.EventRecord(begin, shared.down);
    cu.EventRecord(end, shared.down);
    cu.StreamSynchronize(shared.down);
    Cost("host.event_elapsed_time", 4000, [&] { Milliseconds(begin, end); }, nothing);
  });
  for (const unsigned flags : {kNoTiming, 0u}) {
    idle(
        flags == 0 ? "event_create_and_destroy_timing" : "event_create_and_destroy", 1000,
        [flags] {
          CUevent event = nullptr;
          cu.EventCreate(&event, flags);
          cu.EventDestroy(event);
        },
        nothing);
  }
  idle("stream_synchronize_idle", 2000, [] { cu.StreamSynchronize(shared.down); }, nothing);
  idle("ctx_synchronize_idle", 2000, [] { cu.CtxSynchronize(); }, nothing);
  Figure("host.launch_empty", 0.03, [&] {
    const CUfunction kernel = Kernel(shared.empty);
    Cost("host.launch_empty", 256, [&] { Launch(kernel, 1, 32, shared.compute, nullptr); }, settle);
  });
  Figure("host.launch_empty_and_synchronize", 0.05, [&] {
    const CUfunction kernel = Kernel(shared.empty);
    Cost(
        "host.launch_empty_and_synchronize", 200,
        [&] {
          Launch(kernel, 1, 32, shared.compute, nullptr);
          cu.StreamSynchronize(shared.compute);
        },
        nothing);
  });
  for (const size_t bytes : {size_t{4096}, 16 * kMiB}) {
    for (const bool out : {true, false}) {
      const std::string name = std::string("host.enqueue_") + (out ? "dtoh" : "htod") +
                               (bytes == 4096 ? "_4KiB" : "_16MiB");
      Figure(name, 0.15, [&] {
        const LockedMemory host(bytes);
        const DeviceMemory memory(bytes);
        const auto act = [&] {
          if (out) {
            cu.MemcpyDtoHAsync(host.data(), memory, bytes, shared.down);
          } else {
            cu.MemcpyHtoDAsync(memory, host.data(), bytes, shared.down);
          }
        };
        Cost(name, bytes == 4096 ? 256 : 16, act, settle);
      });
    }
  }
  // Calls while a kernel runs: events are pending and streams busy.
  const auto busy = [&](const std::string& name, int limit, auto act) {
    Figure("host." + name, 0.15, [&] {
      const Event event;
      StartSpin(0.06);
      cu.EventRecord(event, shared.compute);
      const bool before = event.Pending();
      bool during = false;
      Cost("host." + name, limit, [&] { act(event); }, [&] { during = event.Pending(); },
           Json().Flag("pending_before", before));
      Emit("host." + name + ".still_pending", during, "bool");
      cu.CtxSynchronize();
    });
  };
  const auto must_wait = [](CUresult code, const char* call) {
    if (code != kSuccess && code != kNotReady) throw Failed(ErrorText(call, code));
  };
  busy("event_query_pending", 4000, [&](const Event& event) { must_wait(cu.EventQuery.Code(event), "cuEventQuery"); });
  busy("stream_query_busy", 4000,
       [&](const Event&) { must_wait(cu.StreamQuery.Code(shared.compute), "cuStreamQuery"); });
  busy("stream_wait_event_pending", 64, [&](const Event& event) { cu.StreamWaitEvent(shared.down, event, 0); });
  busy("event_record_busy", 64, [&](const Event& event) { cu.EventRecord(event, shared.compute); });
  busy("launch_empty_busy", 32, [&](const Event&) { Launch(Kernel(shared.empty), 1, 32, shared.compute, nullptr); });
}

// ---- 3: pages --------------------------------------------------------------------------------------------------

// Takes up to 512 MiB in whole handles of one size through all ways of taking and giving back, and times each call.
class PageRun {
 public:
  // `kernel_end`: pending while a kernel runs beside; null: none does.
  PageRun(size_t handle_bytes, const Event* kernel_end)
      : size_(handle_bytes), count_(512 * kMiB / handle_bytes), bytes_(size_ * count_),
        kernel_end_(kernel_end), handles_(count_, 0) {
    cu.MemAddressReserve(&base_, 2 * bytes_, 0, 0, 0);
  }
  ~PageRun() {  // frees the remains of a failure; refusals do not matter
    if (failed_) {
      Try([] { cu.CtxSynchronize(); });
      for (size_t i = 0; i < 2 * count_; ++i) Try([&] { cu.MemUnmap(base_ + i * size_, size_); });
      for (const CUmemGenericAllocationHandle handle : handles_) {
        if (handle != 0) Try([&] { cu.MemRelease(handle); });
      }
    }
    Try([&] { cu.MemAddressFree(base_, 2 * bytes_); });
  }
  PageRun(const PageRun&) = delete;
  PageRun& operator=(const PageRun&) = delete;

  // Returns the error; empty: none.
  std::string All() {
    try {
      Steps();
      return "";
    } catch (const Failed& error) {
      failed_ = true;
      return error.what();
    }
  }
  Json detail;
  // Microseconds per MiB of taking a page and giving it back as the core does: create, map, release, access in one call
  // over all, unmap per page.
  double us_per_mib = NAN;

 private:
  // Times `count` calls.
  template <class Act>
  double Phase(const std::string& name, size_t count, Act act) {
    double total = 0, most = 0;
    for (size_t i = 0; i < count; ++i) {
      const double begun = Now();
      act(i);
      const double taken = 1e6 * (Now() - begun);
      total += taken;
      most = std::max(most, taken);
    }
    detail.Add(name + "_us", total / static_cast<double>(count));
    if (count > 1) detail.Add(name + "_most_us", most);
    if (kernel_end_ != nullptr) detail.Flag(name + "_kernel_runs", kernel_end_->Pending());
    return total;
  }
  // One call over many whole mappings. Where the driver refuses it, the error is noted and the pages go one by one.
  void UnmapAll(const std::string& name, CUdeviceptr at) {
    try {
      Phase(name, 1, [&](size_t) { cu.MemUnmap(at, bytes_); });
    } catch (const Failed& error) {
      detail.Add(name + "_error", error.what());
      for (size_t i = 0; i < count_; ++i) cu.MemUnmap(at + i * size_, size_);
    }
  }
  void Create(size_t i) { cu.MemCreate(&handles_[i], size_, &shared.properties, 0); }
  void Release(size_t i) {
    cu.MemRelease(handles_[i]);
    handles_[i] = 0;
  }
  void Steps() {
    const CUdeviceptr second = base_ + bytes_;
    const auto access = [&](CUdeviceptr at, size_t bytes) { cu.MemSetAccess(at, bytes, &shared.access, 1); };
    Phase("create", count_, [&](size_t i) { Create(i); });
    Phase("map", count_, [&](size_t i) { cu.MemMap(base_ + i * size_, size_, 0, handles_[i], 0); });
    Phase("access_each", count_, [&](size_t i) { access(base_ + i * size_, size_); });
    Phase("access_again_each", std::min<size_t>(count_, 32), [&](size_t i) { access(base_ + i * size_, size_); });
    Phase("access_again_all", 1, [&](size_t) { access(base_, bytes_); });
    Phase("unmap_kept_each", count_, [&](size_t i) { cu.MemUnmap(base_ + i * size_, size_); });
    Phase("map_kept_elsewhere", count_, [&](size_t i) { cu.MemMap(second + i * size_, size_, 0, handles_[i], 0); });
    Phase("access_all", 1, [&](size_t) { access(second, bytes_); });
    UnmapAll("unmap_kept_all", second);
    Phase("release", count_, [&](size_t i) { Release(i); });
    // As the core does: the handle is released at once, so that the unmapping frees the memory.
    double total = Phase("take", count_, [&](size_t i) {
      Create(i);
      cu.MemMap(base_ + i * size_, size_, 0, handles_[i], 0);
      Release(i);
    });
    total += Phase("take_access_all", 1, [&](size_t) { access(base_, bytes_); });
    total += Phase("unmap_freeing_each", count_, [&](size_t i) { cu.MemUnmap(base_ + i * size_, size_); });
    us_per_mib = total / (static_cast<double>(bytes_) / kMiB);
    Phase("take_again", count_, [&](size_t i) {
      Create(i);
      cu.MemMap(base_ + i * size_, size_, 0, handles_[i], 0);
      Release(i);
    });
    Phase("take_again_access_all", 1, [&](size_t) { access(base_, bytes_); });
    UnmapAll("unmap_freeing_all", base_);
  }

  size_t size_, count_, bytes_;
  const Event* kernel_end_;
  std::vector<CUmemGenericAllocationHandle> handles_;
  CUdeviceptr base_ = 0;
  bool failed_ = false;
};

constexpr size_t kHandleMiB[] = {2, 8, 20, 32, 128};
double idle_seconds[std::size(kHandleMiB)] = {};  // seconds that the pages took with nothing beside them

std::string PagesName(bool beside, size_t mib) {
  return std::string(beside ? "pages.beside_kernel_" : "pages.idle_") + std::to_string(mib) + "MiB";
}

void PagesOf(size_t index, bool beside) {
  const size_t mib = kHandleMiB[index];
  const std::string name = PagesName(beside, mib);
  const double spin = std::clamp(1.5 * idle_seconds[index] + 0.03, 0.06, 0.6);
  Figure(name, beside ? spin : 0.2, [&] {
    const Event end;
    if (beside) {
      StartSpin(spin);
      cu.EventRecord(end, shared.compute);
    }
    const double begun = Now();
    PageRun run(mib * kMiB, beside ? &end : nullptr);
    std::string error = run.All();
    const double taken = Now() - begun;
    run.detail.Add("all_calls_s", taken);
    if (beside) {
      try {
        run.detail.Add("kernel_s", spin).Flag("kernel_outlived_all", end.Pending());
        if (CheckSpin(run.detail) != 0) error += " the kernel's result is wrong";
      } catch (const Failed& failure) {
        error += " " + std::string(failure.what());
      }
    } else {
      idle_seconds[index] = taken;
    }
    if (error.empty()) {
      Emit(name, run.us_per_mib, "us/MiB", run.detail);
    } else {
      Print(Json().Add("name", name).Add("error", error).Raw("detail", run.detail.Text()));
    }
  });
}

void Pages() {
  for (size_t i = 0; i < std::size(kHandleMiB); ++i) PagesOf(i, false);
}

// Calls `act` right after a kernel of 30 ms has started. Emits its time and whether the kernel outlived it.
template <class Act>
void Blocks(const std::string& name, Act act) {
  Figure("blocks." + name, 0.05, [&] {
    const Event end;
    cu.CtxSynchronize();
    StartSpin(0.03);
    cu.EventRecord(end, shared.compute);
    std::this_thread::sleep_for(std::chrono::microseconds(500));
    const bool before = end.Pending();
    const double begun = Now();
    std::string error;
    try {
      act();
    } catch (const Failed& failure) {
      error = failure.what();
    }
    const double taken = Now() - begun;
    const bool after = end.Pending();
    Json detail;
    detail.Flag("kernel_runs_before", before).Flag("kernel_runs_after", after);
    if (CheckSpin(detail) != 0) error += " the kernel's result is wrong";
    if (!error.empty()) throw Failed(error);
    Emit("blocks." + name, 1e6 * taken, "us", detail);
  });
}

void Beside() {
  CUdeviceptr base = 0, plain = 0;
  CUmemGenericAllocationHandle handle = 0;
  constexpr size_t bytes = 2 * kMiB;
  Figure("blocks.reserve", 0, [&] { cu.MemAddressReserve(&base, 16 * kMiB, 0, 0, 0); });
  Blocks("mem_create", [&] { cu.MemCreate(&handle, bytes, &shared.properties, 0); });
  Blocks("mem_map", [&] { cu.MemMap(base, bytes, 0, handle, 0); });
  Blocks("mem_set_access", [&] { cu.MemSetAccess(base, bytes, &shared.access, 1); });
  Blocks("mem_set_access_again", [&] { cu.MemSetAccess(base, bytes, &shared.access, 1); });
  Blocks("mem_unmap_kept", [&] { cu.MemUnmap(base, bytes); });
  Blocks("mem_map_elsewhere_with_access", [&] {
    cu.MemMap(base + bytes, bytes, 0, handle, 0);
    cu.MemSetAccess(base + bytes, bytes, &shared.access, 1);
  });
  Blocks("mem_release_mapped", [&] { cu.MemRelease(handle); });
  Blocks("mem_unmap_freeing", [&] { cu.MemUnmap(base + bytes, bytes); });
  Blocks("mem_alloc_64MiB", [&] { cu.MemAlloc(&plain, 64 * kMiB); });
  Blocks("mem_free_64MiB", [&] { cu.MemFree(plain); });
  void* host = nullptr;
  Blocks("host_alloc_16MiB", [&] { cu.MemHostAlloc(&host, 16 * kMiB, kPortable); });
  Blocks("free_host_16MiB", [&] { cu.MemFreeHost(host); });
  Figure("blocks.register", 0, [&] {
    HugeMemory memory(16 * kMiB);
    memory.Touch(1);
    Blocks("host_register_16MiB", [&] { memory.Register(0, 16 * kMiB); });
    Blocks("host_unregister_16MiB", [&] { memory.Unregister(); });
  });
  if (base != 0) Try([&] { cu.MemAddressFree(base, 16 * kMiB); });
  for (size_t i = 0; i < std::size(kHandleMiB); ++i) PagesOf(i, true);
}

// ---- 4: page-locking -------------------------------------------------------------------------------------------

bool EnoughHostMemory(const std::string& name, size_t bytes) {
  const double available = ProcBytes("/proc/meminfo", "MemAvailable");
  if (!(available < static_cast<double>(bytes + 2 * kGiB))) return true;
  Print(Json().Add("name", name).Add("skipped", "the machine has too little memory available"));
  return false;
}

double alloc_seconds_per_gib = 0.4;  // the last that was measured

void AllocFigure(const std::string& name, size_t bytes) {
  const double gib = static_cast<double>(bytes) / kGiB;
  if (!EnoughHostMemory(name, bytes)) return;
  Figure(name, 1.2 * gib * alloc_seconds_per_gib, [&] {
    void* memory = nullptr;
    const double begun = Now();
    cu.MemHostAlloc(&memory, bytes, kPortable);
    const double taken = Now() - begun;
    alloc_seconds_per_gib = taken / gib;
    const double huge = ProcBytes("/proc/self/smaps_rollup", "AnonHugePages");
    const double freeing = Now();
    cu.MemFreeHost(memory);
    Emit(name, taken / gib, "s/GiB",
         Json().Add("alloc_s", taken).Add("free_s", Now() - freeing).Add("process_huge_bytes", huge));
  });
}

double touch_register_seconds_per_gib = 0.3;  // the slowest that several threads took: memory new to a VM is slow

void RegisterFigure(const std::string& name, size_t bytes, unsigned threads) {
  const double gib = static_cast<double>(bytes) / kGiB;
  if (!EnoughHostMemory(name, bytes)) return;
  const double rate = threads <= 1 ? std::max(0.5, alloc_seconds_per_gib) : touch_register_seconds_per_gib;
  Figure(name, gib * rate, [&] {
    const double begun = Now();
    HugeMemory memory(bytes);
    const double touched = threads == 0 ? 0 : memory.Touch(threads);
    const double huge = ProcBytes("/proc/self/smaps_rollup", "AnonHugePages");
    const double registered = memory.Register(0, bytes);
    const double unregistered = memory.Unregister();
    const double rate_now = (Now() - begun) / gib;
    if (threads > 1) touch_register_seconds_per_gib = std::max(touch_register_seconds_per_gib, rate_now);
    Emit(name, (touched + registered) / gib, "s/GiB",
         Json()
             .Add("touch_s", touched)
             .Add("register_s", registered)
             .Add("unregister_s", unregistered)
             .Add("threads", threads)
             .Flag("huge_advised", memory.huge())
             .Add("process_huge_bytes", huge));
  });
}

void AcrossPieces() {
  Figure("locking.copy_across_pieces", 0.1, [] {
    constexpr size_t piece = 32 * kMiB, bytes = 2 * piece, words = bytes / 8;
    HugeMemory host(bytes);
    host.Touch(4);
    host.Register(0, piece);
    host.Register(piece, piece);
    const DeviceMemory memory(bytes);
    uint64_t* word = reinterpret_cast<uint64_t*>(host.data());
    for (size_t i = 0; i < words; ++i) word[i] = i * 0x9e3779b97f4a7c15u;
    Json detail;
    const CUresult in = cu.MemcpyHtoDAsync.Code(memory, host.data(), bytes, shared.up);
    detail.Add("htod", ErrorText("cuMemcpyHtoDAsync_v2", in));
    detail.Add("htod_synchronize", ErrorText("cuStreamSynchronize", cu.StreamSynchronize.Code(shared.up)));
    if (in != kSuccess) {  // the bytes come in by pieces then, so that the way out can be judged
      cu.MemcpyHtoDAsync(memory, host.data(), piece, shared.up);
      cu.MemcpyHtoDAsync(memory + piece, host.data() + piece, piece, shared.up);
      cu.StreamSynchronize(shared.up);
    }
    memset(host.data(), 0, bytes);
    const double begun = Now();
    const CUresult out = cu.MemcpyDtoHAsync.Code(host.data(), memory, bytes, shared.down);
    const double returned = Now();
    detail.Add("dtoh", ErrorText("cuMemcpyDtoHAsync_v2", out));
    detail.Add("dtoh_synchronize", ErrorText("cuStreamSynchronize", cu.StreamSynchronize.Code(shared.down)));
    const double done = Now();
    size_t wrong = 0;
    for (size_t i = 0; i < words; ++i) wrong += word[i] != i * 0x9e3779b97f4a7c15u;
    detail.Add("wrong_words", static_cast<double>(wrong));
    detail.Add("dtoh_call_us", 1e6 * (returned - begun)).Add("dtoh_us", 1e6 * (done - begun));
    Emit("locking.copy_across_pieces", in == kSuccess && out == kSuccess && wrong == 0, "works", detail);
  });
}

// Registers two pieces of 1 GiB, each in a thread of its own, at once.
void TwoThreads() {
  const std::string name = "locking.register_two_threads_1GiB_each";
  if (!EnoughHostMemory(name, 2 * kGiB)) return;
  Figure(name, 2 * touch_register_seconds_per_gib, [&] {
    HugeMemory memory(2 * kGiB);
    const double touched = memory.Touch(8);
    double taken[2] = {};
    std::string errors[2];
    const double begun = Now();
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i) {
      threads.emplace_back([&, i] {
        try {
          cu.CtxSetCurrent(shared.context);
          const double from = Now();
          cu.MemHostRegister(memory.data() + i * kGiB, kGiB, kPortable);
          taken[i] = Now() - from;
        } catch (const Failed& error) {
          errors[i] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    const double wall = Now() - begun;
    for (int i = 0; i < 2; ++i) {
      if (errors[i].empty()) memory.Registered(i * kGiB);
    }
    for (const std::string& error : errors) {
      if (!error.empty()) throw Failed(error);
    }
    const double unregistered = memory.Unregister();
    Emit(name, wall / 2, "s/GiB",
         Json()
             .Add("first_s", taken[0])
             .Add("second_s", taken[1])
             .Add("both_s", wall)
             .Add("touch_s", touched)
             .Add("unregister_both_s", unregistered));
  });
}

// Times short calls of this thread while another thread runs `act`: does a long call of one thread hold up the others?
template <class Act>
void CallsBeside(const std::string& name, Act act) {
  const CUfunction kernel = Kernel(shared.empty);
  const Event event;
  std::atomic<bool> done{false};
  std::string error;
  double taken = 0;
  std::thread other([&] {
    try {
      cu.CtxSetCurrent(shared.context);
      const double begun = Now();
      act();
      taken = Now() - begun;
    } catch (const Failed& failure) {
      error = failure.what();
    }
    done = true;
  });
  std::vector<double> launches, records, queries;
  std::string own_error;
  try {
    for (unsigned i = 1; !done; ++i) {
      const double begun = Now();
      Launch(kernel, 1, 32, shared.compute, nullptr);
      const double launched = Now();
      cu.EventRecord(event, shared.compute);
      const double recorded = Now();
      event.Pending();
      queries.push_back(1e6 * (Now() - recorded));
      records.push_back(1e6 * (recorded - launched));
      launches.push_back(1e6 * (launched - begun));
      if (i % 64 == 0) cu.StreamSynchronize(shared.compute);
    }
  } catch (const Failed& failure) {
    own_error = failure.what();
  }
  other.join();
  if (!error.empty() || !own_error.empty()) throw Failed(error.empty() ? own_error : error);
  Json detail;
  detail.Add("long_call_s", taken).Add("rounds", static_cast<double>(launches.size()));
  const std::pair<const char*, std::vector<double>*> all[] = {
      {"launch", &launches}, {"event_record", &records}, {"event_query", &queries}};
  double most = 0;
  for (const auto& [call, values] : all) {
    const Spread spread = SpreadOf(*values);
    detail.Add(std::string(call) + "_us", spread.median).Add(std::string(call) + "_most_us", spread.most);
    if (spread.most > most) most = spread.most;
  }
  Emit(name, most, "us, longest call", detail);
}

void Locking() {
  AllocFigure("locking.host_alloc_1GiB_first", kGiB);
  RegisterFigure("locking.touch_8_register_1GiB", kGiB, 8);
  AcrossPieces();
  AllocFigure("locking.host_alloc_1GiB_again", kGiB);
  RegisterFigure("locking.touch_1_register_1GiB", kGiB, 1);
  RegisterFigure("locking.touch_4_register_1GiB", kGiB, 4);
  RegisterFigure("locking.touch_16_register_1GiB", kGiB, 16);
  if (EnoughHostMemory("locking.calls_beside_register_1GiB", kGiB)) {
    Figure("locking.calls_beside_register_1GiB", 2 * touch_register_seconds_per_gib, [] {
      HugeMemory memory(kGiB);
      memory.Touch(8);
      CallsBeside("locking.calls_beside_register_1GiB", [&] { memory.Register(0, kGiB); });
      CallsBeside("locking.calls_beside_unregister_1GiB", [&] { memory.Unregister(); });
    });
  }
  RegisterFigure("locking.register_untouched_1GiB", kGiB, 0);
  if (EnoughHostMemory("locking.calls_beside_host_alloc_256MiB", kGiB)) {
    Figure("locking.calls_beside_host_alloc_256MiB", 0.4 * alloc_seconds_per_gib, [] {
      void* memory = nullptr;
      CallsBeside("locking.calls_beside_host_alloc_256MiB",
                  [&] { cu.MemHostAlloc(&memory, 256 * kMiB, kPortable); });
      cu.MemFreeHost(memory);
    });
  }
}

// The figures that take longest, behind all other sections.
void Large() {
  TwoThreads();
  RegisterFigure("locking.touch_8_register_4GiB", 4 * kGiB, 8);
  AllocFigure("locking.host_alloc_4GiB", 4 * kGiB);
}

// ---- 5: the link -----------------------------------------------------------------------------------------------

constexpr size_t kLinkBytes = 256 * kMiB;

void Copy(bool out, char* host, CUdeviceptr memory, size_t bytes, CUstream stream) {
  if (out) {
    cu.MemcpyDtoHAsync(host, memory, bytes, stream);
  } else {
    cu.MemcpyHtoDAsync(memory, host, bytes, stream);
  }
}

std::string SizeName(size_t bytes) {
  return bytes < kMiB ? std::to_string(bytes >> 10) + "KiB" : std::to_string(bytes >> 20) + "MiB";
}

// Starts `count` copies, one behind the other, at different addresses; the events stand around them.
void CopyMany(bool out, char* host, CUdeviceptr memory, size_t bytes, size_t count, CUstream stream, CUevent begin,
              CUevent end) {
  cu.EventRecord(begin, stream);
  for (size_t i = 0; i < count; ++i) {
    const size_t at = i * bytes % kLinkBytes;
    Copy(out, host + at, memory + at, bytes, stream);
  }
  cu.EventRecord(end, stream);
}

double GBps(size_t bytes, double milliseconds) { return static_cast<double>(bytes) / milliseconds / 1e6; }

void OneWay(const std::string& kind, bool out, char* host, CUdeviceptr memory, size_t bytes, size_t count) {
  const std::string name = "link." + kind + (out ? "_dtoh_" : "_htod_") + SizeName(bytes);
  Figure(name, 0.05, [&] {
    const CUstream stream = out ? shared.down : shared.up;
    const Event begin(0), end(0);
    std::vector<double> single;
    for (int i = 0; i < (bytes < 64 * kMiB ? 9 : 3); ++i) {
      const double begun = Now();
      Copy(out, host, memory, bytes, stream);
      cu.StreamSynchronize(stream);
      single.push_back(1e6 * (Now() - begun));
    }
    const double begun = Now();
    CopyMany(out, host, memory, bytes, count, stream, begin, end);
    const double queued = Now();
    cu.StreamSynchronize(stream);
    const double done = Now();
    const Spread spread = SpreadOf(single);
    Emit(name, GBps(bytes * count, Milliseconds(begin, end)), "GB/s",
         Json()
             .Add("copies", static_cast<double>(count))
             .Add("one_copy_us", spread.median)
             .Add("one_copy_least_us", spread.least)
             .Add("enqueue_us_each", 1e6 * (queued - begun) / static_cast<double>(count))
             .Add("wall_GBps", GBps(bytes * count, 1e3 * (done - begun))));
  });
}

// Copies both ways at once, of the same memory's two halves.
void BothWays(const std::string& kind, char* out_host, char* in_host, CUdeviceptr out_memory, CUdeviceptr in_memory,
              size_t bytes, size_t count) {
  const std::string name = "link." + kind + "_both_" + SizeName(bytes);
  Figure(name, 0.1, [&] {
    const Event out_begin(0), out_end(0), in_begin(0), in_end(0);
    cu.CtxSynchronize();
    const double begun = Now();
    cu.EventRecord(out_begin, shared.down);
    cu.EventRecord(in_begin, shared.up);
    for (size_t i = 0; i < count; ++i) {
      const size_t at = i * bytes % kLinkBytes;
      Copy(true, out_host + at, out_memory + at, bytes, shared.down);
      Copy(false, in_host + at, in_memory + at, bytes, shared.up);
    }
    cu.EventRecord(out_end, shared.down);
    cu.EventRecord(in_end, shared.up);
    cu.StreamSynchronize(shared.down);
    cu.StreamSynchronize(shared.up);
    const double wall = Now() - begun;
    const double out = GBps(bytes * count, Milliseconds(out_begin, out_end));
    const double in = GBps(bytes * count, Milliseconds(in_begin, in_end));
    Emit(name, GBps(2 * bytes * count, 1e3 * wall), "GB/s in all",
         Json().Add("dtoh_GBps", out).Add("htod_GBps", in).Add("copies_each_way", static_cast<double>(count)));
  });
}

void Pageable(CUdeviceptr memory) {
  for (const bool out : {true, false}) {
    const std::string name = std::string("link.pageable_") + (out ? "dtoh" : "htod") + "_64MiB";
    Figure(name, 0.1, [&] {
      constexpr size_t bytes = 64 * kMiB;
      std::vector<double> rates;
      double call = 0, first = 0;
      char* host = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
      if (host == MAP_FAILED) throw Failed(std::string("mmap: ") + strerror(errno));
      try {
        for (int i = 0; i < 4; ++i) {  // the first copy goes to untouched memory
          const double begun = Now();
          Copy(out, host, memory, bytes, shared.down);
          call = Now() - begun;
          cu.StreamSynchronize(shared.down);
          const double rate = GBps(bytes, 1e3 * (Now() - begun));
          if (i == 0) {
            first = rate;
            memset(host, 1, bytes);
          } else {
            rates.push_back(rate);
          }
        }
      } catch (...) {
        munmap(host, bytes);
        throw;
      }
      munmap(host, bytes);
      Emit(name, SpreadOf(rates).median, "GB/s",
           Json().Add("untouched_GBps", first).Add("call_us", 1e6 * call));
    });
  }
}

void StartAdd(CUdeviceptr memory, size_t bytes, unsigned rounds) {
  CUdeviceptr data = memory;
  unsigned long long count = bytes / 16;
  unsigned value = 1;
  void* parameters[] = {&data, &count, &value, &rounds};
  Launch(Kernel(shared.add), shared.processors * 8, 256, shared.compute, parameters);
}

// Copies while a kernel streams device memory.
void BesideCompute(char* out_host, char* in_host, CUdeviceptr out_memory, CUdeviceptr in_memory) {
  Figure("link.beside_compute", 0.5, [&] {
    constexpr size_t bytes = 512 * kMiB;
    const DeviceMemory data(bytes);
    cu.MemsetD32Async(data, 0, bytes / 4, shared.compute);
    const Event begin(0), end(0);
    unsigned rounds = 20;
    double alone = NAN;
    for (int i = 0; i < 2; ++i) {
      cu.EventRecord(begin, shared.compute);
      StartAdd(data, bytes, rounds);
      cu.EventRecord(end, shared.compute);
      cu.StreamSynchronize(shared.compute);
      alone = Milliseconds(begin, end) / rounds;
    }
    Emit("link.compute_alone", 2 * GBps(bytes, alone), "GB/s read and written", Json().Add("round_ms", alone));
    rounds = static_cast<unsigned>(std::clamp(60 / std::max(alone, 1e-3), 1.0, 2000.0));  // 60 ms
    const auto beside = [&](const char* what, size_t copy_bytes, size_t count, bool out, bool in) {
      const Event out_begin(0), out_end(0), in_begin(0), in_end(0);
      cu.CtxSynchronize();
      cu.EventRecord(begin, shared.compute);
      StartAdd(data, bytes, rounds);
      cu.EventRecord(end, shared.compute);
      if (out) CopyMany(true, out_host, out_memory, copy_bytes, count, shared.down, out_begin, out_end);
      if (in) CopyMany(false, in_host, in_memory, copy_bytes, count, shared.up, in_begin, in_end);
      cu.StreamSynchronize(shared.down);
      cu.StreamSynchronize(shared.up);
      const bool runs = end.Pending();
      cu.StreamSynchronize(shared.compute);
      Json detail;
      double sum = 0;
      if (out) {
        sum += GBps(copy_bytes * count, Milliseconds(out_begin, out_end));
        detail.Add("dtoh_GBps", GBps(copy_bytes * count, Milliseconds(out_begin, out_end)));
      }
      if (in) {
        sum += GBps(copy_bytes * count, Milliseconds(in_begin, in_end));
        detail.Add("htod_GBps", GBps(copy_bytes * count, Milliseconds(in_begin, in_end)));
      }
      const double ratio = Milliseconds(begin, end) / rounds / alone;
      Emit(std::string("link.beside_compute_") + what, sum, "GB/s",
           detail.Flag("kernel_outlived_copies", runs).Add("kernel_time_against_alone", ratio));
    };
    beside("dtoh_64MiB", 64 * kMiB, 24, true, false);
    beside("htod_64MiB", 64 * kMiB, 24, false, true);
    beside("both_64MiB", 64 * kMiB, 16, true, true);
    beside("dtoh_256KiB", 256 * 1024, 64, true, false);
    beside("both_1MiB", kMiB, 128, true, true);
  });
}

void Link() {
  Figure("link.memory", 0.3, [] {
    const DeviceMemory first(kLinkBytes), second(kLinkBytes);
    const LockedMemory out_host(kLinkBytes), in_host(kLinkBytes);
    memset(in_host.data(), 1, kLinkBytes);
    const size_t sizes[] = {64 << 10, 256 << 10, kMiB, 4 * kMiB, 16 * kMiB, 64 * kMiB, 256 * kMiB};
    const auto both = [&](const std::string& kind, char* memory) {
      for (const bool out : {true, false}) {
        for (const size_t bytes : sizes) {
          OneWay(kind, out, memory, first, bytes, std::clamp<size_t>(kLinkBytes / bytes, 3, 64));
        }
      }
    };
    both("host_alloc", out_host.data());
    for (const size_t bytes : {kMiB, 16 * kMiB, 256 * kMiB}) {
      BothWays("host_alloc", out_host.data(), in_host.data(), first, second, bytes,
               std::clamp<size_t>(4 * kLinkBytes / bytes, 4, 128));
    }
    Figure("link.dtod_256MiB", 0.05, [&] {
      const Event begin(0), end(0);
      for (int i = 0; i < 9; ++i) {
        if (i == 1) cu.EventRecord(begin, shared.compute);
        cu.MemcpyDtoDAsync(second, first, kLinkBytes, shared.compute);
      }
      cu.EventRecord(end, shared.compute);
      cu.StreamSynchronize(shared.compute);
      Emit("link.dtod_256MiB", GBps(8 * kLinkBytes, Milliseconds(begin, end)), "GB/s copied");
    });
    Pageable(first);
    BesideCompute(out_host.data(), in_host.data(), first, second);
    Figure("link.registered_memory", 0.3, [&] {
      HugeMemory registered(2 * kLinkBytes);
      registered.Touch(8);
      registered.Register(0, 2 * kLinkBytes);
      both("registered", registered.data());
      BothWays("registered", registered.data(), registered.data() + kLinkBytes, first, second, 16 * kMiB, 64);
      cu.CtxSynchronize();
    });
    cu.CtxSynchronize();
  });
}

// ---- the run ---------------------------------------------------------------------------------------------------

void OnCrash(int number) {
  char text[300];
  const int length = snprintf(text, sizeof text,
                              "{\"name\": \"crash\", \"error\": \"signal %d\", \"detail\": {\"figure\": \"%s\", "
                              "\"call\": \"%s\"}}\n",
                              number, current_figure.load(), current_call.load());
  if (length > 0 && write(1, text, static_cast<size_t>(length)) < 0) _exit(5);
  _exit(4);
}

void Watch(double seconds) {
  std::thread([seconds] {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    Print(Json()
              .Add("name", "watchdog")
              .Add("error", "the time of the run has passed")
              .Raw("detail", Json().Add("figure", current_figure.load()).Add("call", current_call.load()).Text()));
    _exit(3);
  }).detach();
}

struct Part {
  const char* name;
  double most_seconds;     // cap
  double reserve_seconds;  // seconds that are kept for the sections behind it
  void (*run)();
};
constexpr Part kParts[] = {
    {"system", 0.5, 8, System},   {"host", 1.5, 7, HostCosts},  {"pages", 1.5, 6, Pages},
    {"beside", 2.5, 4.5, Beside}, {"locking", 4.5, 2.5, Locking}, {"link", 3, 0.3, Link},
    {"large", 6, 0.2, Large},
};

}  // namespace

int main(int count, char** arguments) {
  double seconds = 15;
  std::vector<std::string> wanted;
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    if (argument.rfind("--seconds=", 0) == 0) {
      seconds = atof(argument.c_str() + 10);
    } else {
      wanted.push_back(argument);
    }
  }
  const double begun = Now();
  end_of_run = end_of_section = begun + seconds;
  const char* path = getenv("MEMMGR_DRIVER");
  if (path == nullptr || *path == 0) path = "libcuda.so.1";
  void* library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    Print(Json().Add("name", "driver").Add("error", dlerror()));
    return 1;
  }
  cu.Load(library);
  struct sigaction action{};
  action.sa_handler = OnCrash;
  for (const int number : {SIGSEGV, SIGBUS, SIGABRT, SIGFPE}) sigaction(number, &action, nullptr);
  Watch(seconds);
  if (!Begin()) return 1;
  std::vector<std::string> left;
  bool lost = false;
  for (const Part& part : kParts) {
    if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), part.name) == wanted.end()) continue;
    if (lost) {
      left.push_back(part.name);
      continue;
    }
    const double from = Now();
    const double scale = std::max(1.0, seconds / 15);  // a longer run has longer sections
    end_of_section = std::min(from + scale * part.most_seconds, end_of_run - part.reserve_seconds);
    part.run();
    Emit(std::string("section.") + part.name, Now() - from, "s");
    const CUresult code = cu.CtxSynchronize.function == nullptr ? kSuccess : cu.CtxSynchronize.Code();
    lost = code != kSuccess;  // an error of a kernel or copy stays with the context for good
    if (lost) Print(Json().Add("name", "context").Add("error", ErrorText("cuCtxSynchronize", code)));
  }
  Emit("run", Now() - begun, "s");
  const double remaining = end_of_run - Now();
  if (left.empty() || remaining < 1) return lost ? 2 : 0;
  std::vector<std::string> texts = {arguments[0], "--seconds=" + Number(remaining)};
  texts.insert(texts.end(), left.begin(), left.end());
  std::vector<char*> again;
  for (std::string& text : texts) again.push_back(&text[0]);
  again.push_back(nullptr);
  execv("/proc/self/exe", again.data());
  return 2;
}
