// The rules of queued work, by name: tests leave one out and see bits change.
#pragma once

#include <atomic>
#include <cstdint>

namespace memmgr::pager {

enum StreamRule : uint32_t {
  kRuleUses = 1,        // what another stream than its home uses is told to the allocator
  kRuleFilled = 2,      // who uses bytes that came back on another stream waits for that one
  kRulePrefetched = 4,  // bytes that were read ahead are used behind their read
  kRuleChecked = 8,     // a checksum is taken behind whoever wrote
  kRuleClosed = 16,     // when the budget has ended nobody has to wait any more
  kRuleLate = 128,      // who may be behind an event of a step waits for its slices that ran after that
  kRuleWhere = 256,     // a slice is queued where its step would have been
  kScribbled = 64,      // no rule: in torture what has left is overwritten, behind all that used it
  kSampled = 32,  // no rule: a sample of what leaves has a checksum; what comes back with one waits for the device
};

// The open budget's device queues its work.
extern std::atomic<bool> queues;
bool rule_holds(StreamRule rule);
void leave_out(uint32_t rules);

}  // namespace memmgr::pager
