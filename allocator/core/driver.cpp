#include "driver.h"

#include <dlfcn.h>
#include <errno.h>

#include <map>
#include <memory>
#include <mutex>

#include "guarded.h"

namespace memmgr {

namespace {

struct Loaded {
  std::mutex mutex;
  std::map<std::string, std::unique_ptr<mm_driver>> by_path;
  // Never destroyed: work may be under way while the process is ending.
  static Loaded& Get() {
    static auto* loaded = new Loaded;
    return *loaded;
  }
};

std::unique_ptr<mm_driver> Open(const std::string& path, std::string* wrong) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* text = dlerror();
    *wrong = text != nullptr ? text : "cannot open " + path;
    return nullptr;
  }
  auto driver = std::make_unique<mm_driver>();
  const char* missing = nullptr;
#define MEMMGR_LOOK_UP(member, name, arguments)                                        \
  driver->member = reinterpret_cast<decltype(driver->member)>(dlsym(library, (name))); \
  if (driver->member == nullptr) missing = name;
  MEMMGR_DRIVER_CALLS(MEMMGR_LOOK_UP)
#undef MEMMGR_LOOK_UP
#define MEMMGR_LOOK_UP(member, name, arguments) \
  driver->member = reinterpret_cast<decltype(driver->member)>(dlsym(library, (name)));
  MEMMGR_OPTIONAL_DRIVER_CALLS(MEMMGR_LOOK_UP)
#undef MEMMGR_LOOK_UP
  if (missing == nullptr) return driver;
  *wrong = path + " has no " + missing;
  dlclose(library);
  return nullptr;
}

}  // namespace

std::string DriverText(const mm_driver& driver, CUresult error) {
  const char* text = nullptr;
  if (driver.GetErrorString(error, &text) != CUDA_SUCCESS || text == nullptr) text = "unknown error";
  return std::string(text) + " (driver error " + std::to_string(error) + ")";
}

int DriverErrno(CUresult error) {
  switch (error) {
    case CUDA_SUCCESS:
      return 0;
    case CUDA_ERROR_OUT_OF_MEMORY:
      return -ENOMEM;
    case CUDA_ERROR_INVALID_VALUE:
      return -EINVAL;
    case CUDA_ERROR_NO_DEVICE:
    case CUDA_ERROR_INVALID_DEVICE:
      return -ENODEV;
    case CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED:
    case CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
      return -EBUSY;
    default:
      return -EIO;
  }
}

EnsureContext::EnsureContext(const mm_driver& driver, int ordinal) : driver_(driver) {
  CUcontext wanted = nullptr;
  CUcontext current = nullptr;
  error_ = driver.PrimaryContext(ordinal, &wanted);
  if (error_ == CUDA_SUCCESS) error_ = driver.CtxGetCurrent(&current);
  if (error_ != CUDA_SUCCESS || current == wanted) return;
  error_ = driver.CtxSetCurrent(wanted);
  before_ = current;
  changed_ = error_ == CUDA_SUCCESS;
}

EnsureContext::~EnsureContext() {
  if (changed_) driver_.CtxSetCurrent(before_);
}

}  // namespace memmgr

CUresult mm_driver::PrimaryContext(int ordinal, CUcontext* out) const {
  if (ordinal < 0 || ordinal >= kMaxDevices) return CUDA_ERROR_INVALID_DEVICE;
  *out = primary_[ordinal].load(std::memory_order_acquire);
  if (*out != nullptr) return CUDA_SUCCESS;
  CUdevice device = 0;
  CUresult error = Init(0);
  if (error == CUDA_SUCCESS) error = DeviceGet(&device, ordinal);
  // Two threads may both reach this line: both get the same context, retained twice.
  if (error == CUDA_SUCCESS) error = DevicePrimaryCtxRetain(out, device);
  if (error == CUDA_SUCCESS) primary_[ordinal].store(*out, std::memory_order_release);
  return error;
}

extern "C" {

const mm_driver* mm_driver_load(const char* path, char* err, size_t err_len) {
  std::string wrong = "out of memory";
  try {
    const std::string name = path != nullptr ? path : "libcuda.so.1";
    memmgr::Loaded& loaded = memmgr::Loaded::Get();
    std::lock_guard hold(loaded.mutex);
    const auto known = loaded.by_path.find(name);
    if (known != loaded.by_path.end()) return known->second.get();
    std::unique_ptr<mm_driver> driver = memmgr::Open(name, &wrong);
    if (driver != nullptr) return (loaded.by_path[name] = std::move(driver)).get();
  } catch (const std::bad_alloc&) {
  }
  memmgr::Say(wrong, err, err_len);
  return nullptr;
}

}  // extern "C"
