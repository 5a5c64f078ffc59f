// Ops that only touch sizes, strides and storages, and copies.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/fill.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>

#include "memory.h"
#include "values.h"

namespace memdev {

constexpr c10::DispatchKeySet kDeviceKeys(c10::DispatchKey::PrivateUse1);

inline void PoisonStorage(const at::Tensor& t) {
  int device = t.device().index();
  Poison(device, CurrentStream(device), const_cast<void*>(t.storage().data()), t.storage().nbytes());
}

inline c10::Device OrCurrent(std::optional<c10::Device> device) {
  if (device && device->has_index()) return *device;
  return c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(thread_state.device));
}

// A graph's memory is memdev's own, whichever allocator is installed: torch's allocators give graphs a separate pool.
inline c10::Allocator* Source() {
  int device = thread_state.device;
  return IsCapturing(device, CurrentStream(device)) ? &memory : c10::GetAllocator(c10::kPrivateUse1);
}

inline at::Tensor Empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                        std::optional<c10::Device> device, std::optional<bool>,
                        std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(OrCurrent(device));
  at::Tensor t = at::detail::empty_generic(size, Source(), kDeviceKeys, at::dtype_or_default(dtype), format);
  PoisonStorage(t);
  return t;
}

inline at::Tensor EmptyStrided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                               std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(OrCurrent(device));
  at::Tensor t = at::detail::empty_strided_generic(size, stride, Source(), kDeviceKeys, at::dtype_or_default(dtype));
  PoisonStorage(t);
  return t;
}

inline at::Tensor View(const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset,
                       caffe2::TypeMeta dtype) {
  at::Tensor out = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()),
                                                            self.key_set(), dtype);
  out.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return out;
}

inline at::Tensor AsStrided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                            std::optional<int64_t> offset) {
  int64_t start = offset.value_or(self.storage_offset());
  at::native::checkInBoundsForStorage<int64_t>(size, stride, start, self.dtype(), self.storage());
  return View(self, size, stride, start, self.dtype());
}

inline at::Tensor ReshapeAlias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return View(self, size, stride, self.storage_offset(), self.dtype());
}

// New memory on the current stream, the old bytes copied in its order. The old memory is let go of at once.
inline void ResizeStorage(c10::StorageImpl* storage, size_t bytes) {
  TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
  c10::Device device = storage->device();
  c10::DeviceGuard guard(device);
  CUstream stream = CurrentStream(device.index());
  c10::DataPtr fresh = c10::GetAllocator(c10::kPrivateUse1)->allocate(bytes);
  Poison(device.index(), stream, fresh.get(), bytes);
  size_t kept = std::min(bytes, storage->nbytes());
  const void* old = static_cast<const c10::StorageImpl*>(storage)->data();
  if (kept > 0 && old != nullptr) {
    Launch(device.index(), stream, std::make_unique<RawCopy>(fresh.get(), old, kept));
  }
  storage->set_nbytes(bytes);
  storage->set_data_ptr_noswap(std::move(fresh));
}

inline void GrowFor(const at::Tensor& t) {
  if (t.numel() == 0) return;
  size_t bytes = at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize(), t.storage_offset());
  auto* storage = t.storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) ResizeStorage(storage, bytes);
}

inline const at::Tensor& Resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (self.sizes() != size) {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    GrowFor(self);
  }
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

inline at::Tensor& SetStorage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                              c10::IntArrayRef stride) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  GrowFor(self);
  return self;
}

inline at::Tensor& SetEmpty(at::Tensor& self) {
  c10::DeviceGuard guard(self.device());
  at::Tensor empty = Empty({0}, self.scalar_type(), std::nullopt, self.device(), std::nullopt, std::nullopt);
  return SetStorage(self, empty.storage(), 0, {0}, {});
}

inline void RecordUse(void* p, c10::Stream stream) {
  if (p != nullptr) memory.Used(p, stream.device_index(), Native(stream));
}

inline void RecordStreamOp(at::Tensor& self, c10::Stream stream) {
  RecordUse(const_cast<void*>(self.storage().data()), stream);
}

// In its parts, which are those of the CPU's: as one seeded op it would have to wait for its input.
inline std::tuple<at::Tensor, at::Tensor> NativeDropout(const at::Tensor& input, double p, std::optional<bool> train) {
  at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool));
  if (!train.value_or(true)) return {input.clone(), mask.fill_(true)};
  double kept = 1. - p;
  mask.bernoulli_(kept);
  return {input.mul(mask).mul_(kept == 0 ? 0. : 1. / kept), mask};
}

constexpr uint64_t kSolidBytes = 4096;  // smaller copies run in hollow mode, too: a program may read them

struct Copy : Work {
  Copy(Ref from, Ref to, bool is_kernel = false) : from(std::move(from)), to(std::move(to)), is_kernel(is_kernel) {}
  void Run() override { to.Cpu().copy_(from.Cpu()); }
  std::string Name() const override { return "copy"; }
  int Engine() const override { return is_kernel || (from.alias && to.alias) ? kCompute : from.alias ? kOut : kIn; }
  uint64_t Bytes() const override { return (from.alias ? from.Bytes() : 0) + (to.alias ? to.Bytes() : 0); }
  bool IsOp() const override { return true; }
  bool IsHollow() const override { return hollow.load() && Bytes() > kSolidBytes; }
  Ref from, to;
  const bool is_kernel;  // a GPU would compute the bytes there; this device does on the host
};

inline at::Tensor CopyFrom(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  if (OnDevice(self) && OnDevice(to)) {
    int source = self.device().index(), target = to.device().index();
    CUstream from_stream = CurrentStream(source), to_stream = CurrentStream(target);
    if (source != target) StreamWaits(target, to_stream, source, from_stream);
    Launch(target, to_stream, std::make_unique<Copy>(MakeRef(self), MakeRef(to)));
    if (source != target) StreamWaits(source, from_stream, target, to_stream);
    return to;
  }
  if (OnDevice(to)) {
    int device = to.device().index();
    // The driver reads page-locked memory when the copy runs, pageable memory while it is being called.
    bool late = self.is_cpu() && pinned_memory.Contains(self.storage().data());
    Launch(device, CurrentStream(device),
           std::make_unique<Copy>(Ref{std::nullopt, late ? self : Snapshot(self)}, MakeRef(to)));
    if (late && !non_blocking) SynchronizeStream(device, CurrentStream(device));
    return to;
  }
  int device = self.device().index();
  TORCH_CHECK(to.is_cpu(), "memdev: no copy to ", to.device());
  Launch(device, CurrentStream(device), std::make_unique<Copy>(MakeRef(self), Ref{std::nullopt, to}));
  if (!non_blocking) SynchronizeStream(device, CurrentStream(device));
  return to;
}

inline at::Tensor CopyFromAndResize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return CopyFrom(self, to, false);
}

}  // namespace memdev
