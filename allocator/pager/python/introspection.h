// Reports to observers: events by op and module, the cells, their holders, the address space. Nothing here changes a
// decision or keeps bytes alive: cells are described under the graph's lock, and no reference to a storage is taken.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "python/bind.h"

namespace memmgr::pager {

struct StorageInfo {
  uint64_t storage, held_bytes, bytes;
  bool counted;
};

FIELDS(StorageInfo, "A storage. `storage`: its address. `held_bytes`: in memory. `counted`: by the budget already.",
       storage, held_bytes, bytes, counted)

// Without a value: the tensor has no storage on the device.
std::optional<StorageInfo> info_of_storage(const at::Tensor& t);

void bind_introspection(Module& m);

}  // namespace memmgr::pager
