// What cudnn asks of torch's allocator before it chooses a kernel by the
// workspace that the kernel wants.
#include <c10/cuda/CUDACachingAllocator.h>

extern "C" size_t largest_workspace() {
  size_t largest = 0;
  c10::cuda::CUDACachingAllocator::get()->cacheInfo(0, &largest);
  return largest;
}
