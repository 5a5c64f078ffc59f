// The rules of queued work, by name: tests leave one out and see bits change.
#pragma once

#include <atomic>
#include <cstdint>

namespace memmgr::pager {

enum StreamRule : uint32_t {
  kRuleUses = 1,        // a use on another stream than the block's home is recorded with the allocator
  kRuleFilled = 2,      // work on bytes that another stream restored waits for that stream
  kRulePrefetched = 4,  // work on prefetched bytes waits for their read
  kRuleChecked = 8,     // a checksum is taken after the last write
  kRuleClosed = 16,     // the device has finished its work when the budget has ended
  kRuleLate = 128,      // work that may follow an event of a step waits for the slices that ran after it
  kRuleWhere = 256,     // a slice is queued on the stream of its step
  kScribbled = 64,      // no rule: in torture mode evicted bytes are overwritten, after all their uses
  kSampled = 32,        // no rule: a sample of evicted cells has a checksum, which is compared at their restore
};

// True while the open budget's device queues its work.
extern std::atomic<bool> queues;
bool rule_holds(StreamRule rule);
void leave_out(uint32_t rules);

}  // namespace memmgr::pager
