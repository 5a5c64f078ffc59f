#include "base/tensors.h"

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/SparseTensorImpl.h>
#include <torch/csrc/autograd/python_variable.h>

namespace memmgr::pager {

void parts_of_sparse(c10::TensorImpl* t, c10::SmallVector<c10::TensorImpl*, 3>* parts) {
  if (t->layout() == c10::kSparse) {
    auto* sparse = static_cast<at::SparseTensorImpl*>(t);
    *parts = {sparse->indices().unsafeGetTensorImpl(), sparse->values().unsafeGetTensorImpl()};
  } else if (at::sparse_csr::is_sparse_compressed(t->layout())) {
    auto* sparse = static_cast<at::SparseCsrTensorImpl*>(t);
    *parts = {sparse->compressed_indices().unsafeGetTensorImpl(), sparse->plain_indices().unsafeGetTensorImpl(),
              sparse->values().unsafeGetTensorImpl()};
  }
}

StoragePtr storage_of(PyObject* o) {
  if (THPVariable_Check(o)) {
    const at::Tensor& t = THPVariable_Unpack(o);
    if (!t.defined() || !t.unsafeGetTensorImpl()->has_storage()) return {};
    return StoragePtr::reclaim_copy(t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  }
  if (PyLong_Check(o)) return StoragePtr::reclaim_copy(static_cast<c10::StorageImpl*>(PyLong_AsVoidPtr(o)));
  return {};
}

}  // namespace memmgr::pager
