// What is told to whoever looks: what happened, by op and module, the cells as they are, who holds what, the address
// space. Nothing here changes a decision or holds a byte: cells are described under the graph's lock and no reference
// to a storage is taken.
#pragma once

#include <ATen/core/Tensor.h>
#include <Python.h>

#include <atomic>
#include <cstdint>

#include "recipes/recipe.h"

namespace memmgr::pager {

enum class Event : uint8_t { kEvict, kOffload, kReload, kRematerialize, kStall };

// Somebody looks: only then what happens is noted, in a table of bounded size.
extern std::atomic<bool> watched;

void add_event(Event what, const Recipe* made_by, uint64_t bytes, uint64_t ns);
// `made_by`: of the bytes that it is about, null where that is not known. The graph's lock is held, or the recipe is
// the caller's.
inline void note_event(Event what, const Recipe* made_by, uint64_t bytes, uint64_t ns) {
  if (C10_UNLIKELY(watched.load(std::memory_order_relaxed))) add_event(what, made_by, bytes, ns);
}

// The number of the module that this thread's recorded op belongs to; 0: not known.
uint32_t module_of_recorded(const OpInfo* info);
inline uint32_t module_of(const OpInfo* info) {
  return C10_UNLIKELY(watched.load(std::memory_order_relaxed)) ? module_of_recorded(info) : 0;
}

// The module that this thread is in while the hooks are in place; 0: none, or not known.
uint32_t current_module();

void end_watch();  // what happens from here on is nobody's; what has is there to be drained
void forget_watch_in_child();

// (its storage's address, bytes in memory, bytes, counted by the budget already); None: no storage on the device
PyObject* info_of_storage(const at::Tensor& t);

extern PyMethodDef observe_methods[];

}  // namespace memmgr::pager
