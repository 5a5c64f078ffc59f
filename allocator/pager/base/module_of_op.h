// The module that an op belongs to.
#pragma once

#include <cstdint>

#include "base/events.h"

namespace memmgr::pager {

// Places in reports that are no module. Numbers of modules are larger (memmgr/telemetry/modules.py).
enum NoModule : uint32_t { kUnknownPlace, kOutside, kBackward, kParameters, kGradients, kOptimizerStates, kData };

// Returns the number of the module that this thread's recorded op belongs to; 0: not known.
uint32_t module_of_recorded(const OpInfo* info);
inline uint32_t module_of(const OpInfo* info) {
  return C10_UNLIKELY(watched.load(std::memory_order_relaxed)) ? module_of_recorded(info) : 0;
}

// Returns the module that this thread is in while the hooks are in place; 0: none, or not known.
uint32_t current_module();
// The same, or kOutside where the hooks are in place and this thread is in no module.
uint32_t current_place();
void set_current_module(uint32_t number);
// While it is on, set_current_module() is called for every module, and the route through them is recorded.
void learn_modules(bool on);
void end_pass_of_modules();    // a pass ends in this thread
uint64_t take_mispredicted();  // recorded ops since the last call whose module is not known

}  // namespace memmgr::pager
