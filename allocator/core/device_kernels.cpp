#include "device_kernels.h"

#include <errno.h>
#include <sched.h>

#include <algorithm>
#include <memory>
#include <mutex>

#include "device_kernels.ptx.h"
#include "device_pages.h"
#include "ordering.h"

namespace memmgr {

namespace {

constexpr uint16_t kWords = 512;
constexpr size_t kKeptEvents = 8;  // one in 64 evicted blocks has a sum, and each restored one of them another
constexpr unsigned kThreads = 256;
constexpr uint64_t kMostBlocks = 1024;
constexpr uint64_t kNotFilled = uint64_t{1} << 32;  // no 4 bytes are that
constexpr uint64_t kBytesPerBlock = kThreads * 64;  // four loads of 16 bytes for each thread

}  // namespace

// While this lives the calling thread may call the driver for this device.
class DeviceKernels::Using {
 public:
  explicit Using(const DeviceKernels* kernels)
      : context_(kernels->driver_, kernels->ordinal_), relaxed_(kernels->driver_), driver_(kernels->driver_) {}
  // 0, -EBUSY or another -errno: whether kernels may be queued on the stream now.
  int MayQueue(CUstream stream) const {
    if (context_.error() != CUDA_SUCCESS) return DriverErrno(context_.error());
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    const CUresult error = driver_.StreamIsCapturing(stream, &status);
    // Another stream's capture forbids even the question.
    if (error == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) return -EBUSY;
    if (error != CUDA_SUCCESS) return DriverErrno(error);
    return status == CU_STREAM_CAPTURE_STATUS_NONE ? 0 : -EBUSY;
  }

 private:
  const EnsureContext context_;
  const RelaxedCapture relaxed_;
  const mm_driver& driver_;
};

int DeviceKernels::Noted(CUresult error) {
  if (error != CUDA_SUCCESS) ++errors_;
  return DriverErrno(error);
}

// ---- life ------------------------------------------------------------------------------------------------------

DeviceKernels::~DeviceKernels() {
  if (state_.load() != kReady) return;
  const Using driver(this);
  for (mm_sum* sum : pending_) {
    driver_.EventDestroy(sum->event);
    delete sum;
  }
  for (CUevent event : events_) driver_.EventDestroy(event);
  Unload();
}

bool DeviceKernels::Ready() {
  int state = state_.load(std::memory_order_acquire);
  if (state == kUnknown) {
    std::lock_guard hold(loading_);
    state = state_.load(std::memory_order_acquire);
    if (state == kUnknown) {
      state = Load() ? kReady : kAbsent;
      state_.store(state, std::memory_order_release);
    }
  }
  return state == kReady;
}

// An error here is not counted: it only means that bytes are fetched instead.
bool DeviceKernels::Load() {
  if (driver_.ModuleLoadData == nullptr || driver_.ModuleGetFunction == nullptr || driver_.LaunchKernel == nullptr)
    return false;
  free_.reserve(kWords);
  pending_.reserve(kWords);
  events_.reserve(kKeptEvents);
  const Using driver(this);
  CUresult error = driver_.ModuleLoadData(&module_, kDeviceKernels);
  if (error != CUDA_SUCCESS) module_ = nullptr;
  if (error == CUDA_SUCCESS) error = driver_.ModuleGetFunction(&sum_, module_, "mm_sum");
  if (error == CUDA_SUCCESS) error = driver_.ModuleGetFunction(&compare_, module_, "mm_compare");
  if (error == CUDA_SUCCESS) error = driver_.ModuleGetFunction(&fill_, module_, "mm_fill");
  if (error == CUDA_SUCCESS) error = driver_.ModuleGetFunction(&word_, module_, "mm_word");
  if (error == CUDA_SUCCESS) error = driver_.ModuleGetFunction(&delay_, module_, "mm_delay");
  if (error == CUDA_SUCCESS) error = driver_.MemAlloc(&words_, kWords * sizeof(uint64_t));
  if (error == CUDA_SUCCESS) {
    void* fetched = nullptr;
    error = driver_.MemHostAlloc(&fetched, kWords * sizeof(uint64_t), 0);
    fetched_ = error == CUDA_SUCCESS ? static_cast<uint64_t*>(fetched) : nullptr;
  }
  if (error != CUDA_SUCCESS) {
    Unload();
    return false;
  }
  for (uint16_t word = kWords; word > 0; --word) free_.push_back(static_cast<uint16_t>(word - 1));
  return true;
}

void DeviceKernels::Unload() {
  if (fetched_ != nullptr) driver_.MemFreeHost(fetched_);
  if (words_ != 0) driver_.MemFree(words_);
  if (module_ != nullptr && driver_.ModuleUnload != nullptr) driver_.ModuleUnload(module_);
  fetched_ = nullptr;
  words_ = 0;
  module_ = nullptr;
}

// ---- words -----------------------------------------------------------------------------------------------------

uint64_t DeviceKernels::Read(uint16_t word) const { return *static_cast<const volatile uint64_t*>(fetched_ + word); }

// The event has passed: the value is here, and word and event are free.
void DeviceKernels::SettleLocked(mm_sum* sum) {
  sum->value = Read(sum->word);
  free_.push_back(sum->word);
  if (events_.size() < kKeptEvents)
    events_.push_back(sum->event);
  else
    driver_.EventDestroy(sum->event);
  sum->event = nullptr;
}

void DeviceKernels::HarvestLocked() {
  std::erase_if(pending_, [&](mm_sum* sum) {
    if (sum->awaited || driver_.EventQuery(sum->event) != CUDA_SUCCESS) return false;
    SettleLocked(sum);
    if (sum->dropped) delete sum;
    return true;
  });
}

// When all words are taken, those of sums that have ended are free again. The calling thread is Using the driver.
uint16_t DeviceKernels::TakeWord() {
  for (;; sched_yield()) {
    std::lock_guard hold(lock_);
    const bool dropped = std::any_of(pending_.begin(), pending_.end(), [](const mm_sum* sum) { return sum->dropped; });
    if (free_.empty() || dropped) HarvestLocked();
    if (free_.empty()) continue;
    const uint16_t word = free_.back();
    free_.pop_back();
    return word;
  }
}

void DeviceKernels::GiveWord(uint16_t word) {
  std::lock_guard hold(lock_);
  free_.push_back(word);
}

// ---- kernels ---------------------------------------------------------------------------------------------------

CUresult DeviceKernels::Launch(CUfunction function, uint64_t bytes, CUstream stream, void** arguments) {
  const uint64_t blocks = std::clamp<uint64_t>((bytes + kBytesPerBlock - 1) / kBytesPerBlock, 1, kMostBlocks);
  return driver_.LaunchKernel(function, static_cast<unsigned>(blocks), 1, 1, kThreads, 1, 1, 0, stream, arguments,
                              nullptr);
}

CUresult DeviceKernels::LaunchFill(CUdeviceptr p, uint64_t word, uint64_t bytes, CUstream stream) {
  void* arguments[] = {&p, &bytes, &word};
  return Launch(fill_, bytes, stream, arguments);
}

CUresult DeviceKernels::Queue(Look look, uint16_t word, CUstream stream) {
  CUdeviceptr result = OnDevice(word);
  void* of_one[] = {&look.a, &look.bytes, &result};
  void* of_two[] = {&look.a, &look.b, &look.bytes, &look.filled, &result};
  uint64_t* host = fetched_ + word;  // the device reaches page-locked memory by the host's address
  void* to_host[] = {&result, &host};
  CUresult error = LaunchFill(result, 0, sizeof(uint64_t), stream);
  if (error == CUDA_SUCCESS)
    error = look.b == 0 ? Launch(sum_, look.bytes, stream, of_one) : Launch(compare_, look.bytes, stream, of_two);
  if (error == CUDA_SUCCESS) error = Launch(word_, sizeof(uint64_t), stream, to_host);
  // A part may have been queued, and the word must not be another call's until that has run.
  if (error != CUDA_SUCCESS) driver_.StreamSynchronize(stream);
  return error;
}

int DeviceKernels::Evaluate(const Look& look, CUstream stream, uint64_t* result) {
  if (!Ready()) return -ENOSYS;
  const Using driver(this);
  if (const int refused = driver.MayQueue(stream); refused != 0) return refused;
  const uint16_t word = TakeWord();
  CUresult error = Queue(look, word, stream);
  if (error == CUDA_SUCCESS) error = Order<"kernel.done">([&] { return driver_.StreamSynchronize(stream); });
  *result = Read(word);
  GiveWord(word);
  return Noted(error);
}

int DeviceKernels::Fill(void* p, unsigned char byte, uint64_t bytes, CUstream stream) {
  if (!Ready()) return -ENOSYS;
  const Using driver(this);
  if (const int refused = driver.MayQueue(stream); refused != 0) return refused;
  return Noted(LaunchFill(reinterpret_cast<CUdeviceptr>(p), byte * 0x0101010101010101u, bytes, stream));
}

int DeviceKernels::Delay(uint64_t nanoseconds, CUstream stream) {
  if (!Ready()) return -ENOSYS;
  const Using driver(this);
  if (const int refused = driver.MayQueue(stream); refused != 0) return refused;
  void* arguments[] = {&nanoseconds};
  return Noted(driver_.LaunchKernel(delay_, 1, 1, 1, 1, 1, 1, 0, stream, arguments, nullptr));
}

int DeviceKernels::Compare(const void* first, const void* second, uint64_t bytes, int fill, CUstream stream,
                           unsigned* found) {
  const uint64_t filled = fill < 0 ? kNotFilled : static_cast<unsigned char>(fill) * uint64_t{0x01010101};
  const Look look{reinterpret_cast<CUdeviceptr>(first), reinterpret_cast<CUdeviceptr>(second), bytes, filled};
  uint64_t bits = MM_DIFFERS | MM_OTHER;
  const int error = Evaluate(look, stream, &bits);
  *found = static_cast<unsigned>(bits);
  return error;
}

int DeviceKernels::Sum(const void* p, uint64_t bytes, CUstream stream, uint64_t* sum) {
  return Evaluate({reinterpret_cast<CUdeviceptr>(p), 0, bytes}, stream, sum);
}

int DeviceKernels::BeginSum(const void* p, uint64_t bytes, CUstream stream, mm_sum** out) {
  if (!Ready()) return -ENOSYS;
  const Using driver(this);
  if (const int refused = driver.MayQueue(stream); refused != 0) return refused;
  auto sum = std::make_unique<mm_sum>();
  sum->word = TakeWord();
  CUresult error = CUDA_SUCCESS;
  {
    std::lock_guard hold(lock_);
    if (!events_.empty()) {
      sum->event = events_.back();
      events_.pop_back();
    }
  }
  if (sum->event == nullptr) error = driver_.EventCreate(&sum->event, CU_EVENT_DISABLE_TIMING);
  if (error == CUDA_SUCCESS) error = Queue({reinterpret_cast<CUdeviceptr>(p), 0, bytes}, sum->word, stream);
  if (error == CUDA_SUCCESS) {
    error = driver_.EventRecord(sum->event, stream);
    if (error != CUDA_SUCCESS) driver_.StreamSynchronize(stream);  // nothing marks the copy's end
  }
  std::lock_guard hold(lock_);
  if (error == CUDA_SUCCESS) {
    *out = sum.get();
    pending_.push_back(sum.release());  // it has room: see Load
    return 0;
  }
  free_.push_back(sum->word);
  if (sum->event != nullptr) driver_.EventDestroy(sum->event);
  return Noted(error);
}

bool DeviceKernels::SumIsThere(mm_sum* sum) {
  const Using driver(this);
  std::lock_guard hold(lock_);
  return sum->event == nullptr || driver_.EventQuery(sum->event) != CUDA_ERROR_NOT_READY;
}

int DeviceKernels::EndSum(mm_sum* sum, uint64_t* value) {
  const Using driver(this);
  CUevent event = nullptr;
  {
    std::lock_guard hold(lock_);
    event = sum->event;
    sum->awaited = event != nullptr;
  }
  CUresult error = CUDA_SUCCESS;
  if (event != nullptr) error = Order<"sum.done">([&] { return driver_.EventSynchronize(event); });
  {
    std::lock_guard hold(lock_);
    if (event != nullptr) {
      std::erase(pending_, sum);
      SettleLocked(sum);
    }
    *value = sum->value;
  }
  delete sum;
  return Noted(error);
}

// Makes no call of the driver: it may be called under the pager's lock.
void DeviceKernels::DropSum(mm_sum* sum) {
  std::lock_guard hold(lock_);
  if (sum->event == nullptr)
    delete sum;
  else
    sum->dropped = true;
}

void DeviceKernels::EndDropped() {
  {
    std::lock_guard hold(lock_);
    if (pending_.empty()) return;
  }
  const Using driver(this);
  std::lock_guard hold(lock_);
  HarvestLocked();
}

int DeviceKernels::SynchronizeStream(CUstream stream) {
  const Using driver(this);
  if (const int refused = driver.MayQueue(stream); refused != 0) return refused;
  return Noted(Order<"stream.done">([&] { return driver_.StreamSynchronize(stream); }));
}

}  // namespace memmgr
