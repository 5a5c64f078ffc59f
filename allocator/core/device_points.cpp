#include "device_points.h"

#include <mutex>

#include "guarded.h"

namespace memmgr {
namespace {

constexpr size_t kMostPoints = 65536;

}  // namespace

Points::~Points() {
  if (device_->forked()) return;
  const auto context = device_->EnsureContext();
  if (context.error() != CUDA_SUCCESS) return;
  for (CUevent event : events_) device_->driver().EventDestroy(event);
}

int Points::Add(CUstream stream) {
  if (device_->forked()) return -1;
  const auto context = device_->EnsureContext();
  if (context.error() != CUDA_SUCCESS) return -1;
  const mm_driver& driver = device_->driver();
  const RelaxedCapture relaxed(driver);
  int status = CU_STREAM_CAPTURE_STATUS_NONE;
  if (driver.StreamIsCapturing(stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE) return -1;
  std::lock_guard hold(lock_);
  CUevent event = nullptr;
  if (events_.size() >= kMostPoints) return -1;
  if (events_.capacity() == 0) events_.reserve(kMostPoints);  // no add throws after its event is made
  if (driver.EventCreate(&event, CU_EVENT_DEFAULT) != CUDA_SUCCESS) return -1;
  if (driver.EventRecord(event, stream) != CUDA_SUCCESS) {
    driver.EventDestroy(event);
    return -1;
  }
  events_.push_back(event);
  return static_cast<int>(events_.size() - 1);
}

CUevent Points::Event(int number) {
  std::lock_guard hold(lock_);
  return number >= 0 && static_cast<size_t>(number) < events_.size() ? events_[static_cast<size_t>(number)] : nullptr;
}

double Points::Between(int first, int second) {
  CUevent begin = Event(first), end = Event(second);
  if (begin == nullptr || end == nullptr || device_->forked()) return -1;
  const auto context = device_->EnsureContext();
  if (context.error() != CUDA_SUCCESS) return -1;
  const mm_driver& driver = device_->driver();
  const RelaxedCapture relaxed(driver);
  float milliseconds = 0;
  if (driver.EventSynchronize(end) != CUDA_SUCCESS) return -1;
  if (driver.EventElapsedTime(&milliseconds, begin, end) != CUDA_SUCCESS) return -1;
  return milliseconds * 1e-3;
}

}  // namespace memmgr

namespace {

memmgr::Points* Of(mm_points* points) { return reinterpret_cast<memmgr::Points*>(points); }

}  // namespace

extern "C" {

mm_points* mm_points_begin(mm_device* device) {
  return memmgr::Guarded<mm_points*>(nullptr, [&] {
    return reinterpret_cast<mm_points*>(new memmgr::Points(reinterpret_cast<memmgr::Device*>(device)));
  });
}

int mm_points_add(mm_points* points, mm_stream stream) {
  return memmgr::Guarded(-1, [&] { return Of(points)->Add(stream); });
}

double mm_points_between(mm_points* points, int first, int second) {
  return memmgr::Guarded(-1.0, [&] { return Of(points)->Between(first, second); });
}

void mm_points_end(mm_points* points) { delete Of(points); }

}  // extern "C"
