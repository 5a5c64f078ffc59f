// The pool of an accelerator: its memory in stream order (memmgr/device.h). CUDA's blocks come from the allocator that
// replaces torch's there (allocator/cuda). Other devices look up their allocator at every use, so it is registered
// there.
#pragma once

#include "memmgr/plugin.h"
#include "pools/pool.h"

namespace memmgr::pager {

// driver: a library with the driver's entry points; null for CUDA's. Throws if the memory cannot be opened.
Pool* device_pool(Session& session, c10::Device where, const char* driver);
// Sets the table of CUDA's allocator, which is memmgr's, or torch's own behind memmgr's interface.
void use_plugin(const mm_plugin* plugin);

}  // namespace memmgr::pager
