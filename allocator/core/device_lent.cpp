// Blocks of another allocator on a device: counted, and in order (mm_device_lend).
#include <mutex>

#include "device.h"
#include "ordering.h"

namespace memmgr {

void Device::Lend(const void* block, uint64_t bytes, CUstream home) {
  const int number = Number(home);
  int64_t more = static_cast<int64_t>(bytes);
  {
    std::lock_guard hold(lent_lock_);
    lends_.store(true, std::memory_order_relaxed);
    Lent& lent = lent_[block];
    more -= static_cast<int64_t>(lent.bytes);  // an end that was not reported
    lent = {bytes, home, number < 0 ? kAnything : Bit(number), {{kTail, 0, 0}}};
  }
  arena_->AddOutside(more);
}

// The owner gives the memory on in order of its home, and has no record of other streams that memmgr let use it.
void Device::LentEnds(const void* block) {
  Lent lent;
  {
    std::lock_guard hold(lent_lock_);
    const auto found = lent_.find(block);
    if (found == lent_.end()) return;
    lent = found->second;
    lent_.erase(found);
  }
  arena_->AddOutside(-static_cast<int64_t>(lent.bytes));
  const int number = Number(lent.home);
  const StreamMask foreign = number < 0 ? kAnything : Foreign(lent.touched, number);
  if (foreign == 0) return;
  Order<"lent.touched">([&] {
    const StreamMask failed = WaitFor(lent.home, foreign, lent.times);
    return failed == 0 ? 0 : SynchronizeAll(failed);  // a home that is being captured waits for nothing outside
  });
}

void Device::ForgetLent() {
  int64_t bytes = 0;
  {
    std::lock_guard hold(lent_lock_);
    for (const auto& [block, lent] : lent_) bytes += static_cast<int64_t>(lent.bytes);
    lent_.clear();
  }
  arena_->AddOutside(-bytes);
}

}  // namespace memmgr
