// The pool of an accelerator: its memory in stream order (memmgr/device.h). CUDA's blocks come from the allocator that
// lies in torch's place there (allocator/cuda); other devices have theirs looked up at every use, so it is put there.
#pragma once

#include "memmgr/plugin.h"
#include "pools/pool.h"

namespace memmgr::pager {

// driver: a library with the driver's entry points, null for CUDA's. Throws where the memory cannot be had.
Pool* device_pool(c10::Device where, const char* driver);
// CUDA's allocator is ours, or torch's own behind our door, and this is its table.
void use_plugin(const mm_plugin* plugin);

}  // namespace memmgr::pager
