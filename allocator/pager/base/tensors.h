// The storages of tensors and of arguments.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <Python.h>
#include <c10/core/StorageImpl.h>

namespace memmgr::pager {

using StoragePtr = c10::intrusive_ptr<c10::StorageImpl>;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

inline at::DataPtr& pointer_of(const c10::StorageImpl* s) {
  return const_cast<c10::StorageImpl*>(s)->_mutable_data_ptr_no_checks();
}

void parts_of_sparse(c10::TensorImpl* t, c10::SmallVector<c10::TensorImpl*, 3>* parts);

// Visits the storages of a tensor: its own, or those of a sparse tensor's parts, which are read without an op.
template <class OnStorage>
void each_storage(c10::TensorImpl* t, const OnStorage& on_storage) {
  if (C10_LIKELY(t->has_storage())) {
    on_storage(t->unsafe_storage().unsafeGetStorageImpl());
  } else {
    c10::SmallVector<c10::TensorImpl*, 3> parts;
    parts_of_sparse(t, &parts);
    for (c10::TensorImpl* part : parts) each_storage(part, on_storage);
  }
}

// Visits the tensors and the bare storages in a value.
template <class OnTensor, class OnStorage>
void each_tensor(const c10::IValue& v, const OnTensor& on_tensor, const OnStorage& on_storage) {
  if (v.isTensor()) {
    on_tensor(v.unsafeToTensorImpl());
  } else if (v.isList()) {
    for (const c10::IValue& item : v.toListRef()) each_tensor(item, on_tensor, on_storage);
  } else if (v.isStorage()) {
    on_storage(v.toStorage().unsafeGetStorageImpl());
  } else if (v.isTuple()) {
    for (const c10::IValue& item : v.toTupleRef().elements()) each_tensor(item, on_tensor, on_storage);
  } else if (v.isGenericDict()) {
    for (const auto& entry : v.toGenericDict()) each_tensor(entry.value(), on_tensor, on_storage);
  }
}

// Returns null if the object is neither a tensor with a storage nor the address of a storage. The GIL is held.
StoragePtr storage_of(PyObject* tensor_or_address);

}  // namespace memmgr::pager
