// The arguments and results of an op, as a kernel needs them: raw pointers instead of device tensors.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include <optional>
#include <vector>

#include "driver.h"

namespace memdev {

inline bool OnDevice(const at::Tensor& t) { return t.defined() && t.device().is_privateuseone(); }

// A device tensor's place in memory. It does not keep the memory alive.
struct Alias {
  void* p = nullptr;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kFloat;
  bool conj = false, neg = false;

  Alias() = default;
  explicit Alias(const at::Tensor& t)
      : sizes(t.sizes().vec()), strides(t.strides().vec()), dtype(t.scalar_type()), conj(t.is_conj()), neg(t.is_neg()) {
    const auto& storage = t.storage();
    auto* start = static_cast<char*>(const_cast<void*>(storage.data()));
    if (t.numel() == 0) return;
    TORCH_CHECK(start != nullptr, "memdev: a kernel was given a storage of ", storage.nbytes(),
                " bytes without memory");
    size_t end = t.storage_offset() * t.itemsize();
    for (size_t i = 0; i < sizes.size(); ++i) end += (sizes[i] - 1) * strides[i] * t.itemsize();
    TORCH_CHECK(end + t.itemsize() <= storage.nbytes(),
                "memdev: a kernel was given a view that passes its storage's end");
    p = start + t.storage_offset() * t.itemsize();
  }

  // Each element once.
  uint64_t Bytes() const {
    if (p == nullptr) return 0;
    uint64_t count = c10::elementSize(dtype);
    for (size_t i = 0; i < sizes.size(); ++i) count *= strides[i] == 0 ? 1 : static_cast<uint64_t>(sizes[i]);
    return count;
  }

  // A CPU tensor over the same bytes.
  at::Tensor Cpu() const {
    auto options = at::TensorOptions().dtype(dtype).device(at::kCPU);
    at::Tensor t =
        p == nullptr ? at::empty_strided(sizes, strides, options) : at::from_blob(p, sizes, strides, options);
    if (conj) t._set_conj(true);
    if (neg) t._set_neg(true);
    return t;
  }
};

// One tensor of an argument: on the device (an alias), on the CPU (owned), or undefined.
struct Ref {
  std::optional<Alias> alias;
  at::Tensor host;
  at::Tensor Cpu() const { return alias ? alias->Cpu() : host; }
  uint64_t Bytes() const { return alias ? alias->Bytes() : host.defined() ? host.nbytes() : 0; }
};

// A copy that the caller can change or free the original of.
inline at::Tensor Snapshot(const at::Tensor& t) {
  at::Tensor copy = t.clone();
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

inline Ref MakeRef(const at::Tensor& t) {
  if (!t.defined()) return {};
  if (OnDevice(t)) return {Alias(t), {}};
  return {std::nullopt, Snapshot(t)};
}

inline bool HoldsTensors(const c10::IValue& v) { return v.isTensor() || v.isTensorList() || v.isOptionalTensorList(); }

// Every tensor in v; undefined ones too.
inline std::vector<at::Tensor> TensorsOf(const c10::IValue& v) {
  std::vector<at::Tensor> out;
  if (v.isTensor()) {
    out.push_back(v.toTensor());
  } else if (v.isTensorList()) {
    for (const at::Tensor& t : v.toTensorVector()) out.push_back(t);
  } else if (v.isOptionalTensorList()) {
    for (const auto& t : v.toOptionalTensorVector()) out.push_back(t.value_or(at::Tensor()));
  }
  return out;
}

// v with each tensor replaced by the one at its place.
inline c10::IValue WithTensors(const c10::IValue& v, const std::vector<at::Tensor>& tensors) {
  if (v.isTensor()) return tensors[0];
  if (v.isTensorList()) return c10::List<at::Tensor>(tensors);
  c10::List<std::optional<at::Tensor>> list;
  for (const at::Tensor& t : tensors) list.push_back(t.defined() ? std::optional<at::Tensor>(t) : std::nullopt);
  return list;
}

// An argument or a result, ready for a kernel.
struct Value {
  c10::IValue plain;  // the value; tensors in it are dropped
  bool tensors = false;
  std::vector<Ref> refs;

  static Value Of(const c10::IValue& v) {
    Value out;
    out.tensors = HoldsTensors(v);
    if (!out.tensors) {
      out.plain = v.isDevice() && v.toDevice().is_privateuseone() ? c10::IValue(c10::Device(c10::kCPU)) : v;
      return out;
    }
    std::vector<at::Tensor> all = TensorsOf(v);
    for (const at::Tensor& t : all) out.refs.push_back(MakeRef(t));
    out.plain = WithTensors(v, std::vector<at::Tensor>(all.size()));
    return out;
  }

  c10::IValue Cpu() const {
    if (!tensors) return plain;
    std::vector<at::Tensor> all;
    for (const Ref& ref : refs) all.push_back(ref.Cpu());
    return WithTensors(plain, all);
  }
};

// The same argument with tensors that have no bytes.
inline at::Tensor Meta(const at::Tensor& t) {
  if (!t.defined() || (!OnDevice(t) && t.dim() == 0)) return t;
  at::Tensor meta = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
  if (t.is_conj()) meta._set_conj(true);
  if (t.is_neg()) meta._set_neg(true);
  return meta;
}

inline c10::IValue Meta(const c10::IValue& v) {
  if (v.isDevice() && v.toDevice().is_privateuseone()) return c10::Device(c10::kMeta);
  if (!HoldsTensors(v)) return v;
  std::vector<at::Tensor> all = TensorsOf(v);
  for (at::Tensor& t : all) t = Meta(t);
  return WithTensors(v, all);
}

}  // namespace memdev
