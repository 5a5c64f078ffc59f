// Calls torch's allocator as cudnn does before it chooses a kernel by its workspace.
#include <c10/cuda/CUDACachingAllocator.h>

extern "C" size_t largest_workspace() {
  size_t largest = 0;
  c10::cuda::CUDACachingAllocator::get()->cacheInfo(0, &largest);
  return largest;
}
