// The place of a thread in ops, compiled regions and calls of readers.
#pragma once

#include <cstdint>

namespace memmgr::pager {

// Ops that this thread is in. An op inside another one has been admitted with it.
extern thread_local int tl_depth;
// Compiled regions that this thread is in. Their arguments are pinned, and their outputs are theirs until they return.
extern thread_local int tl_regions;
// True while an optimizer makes its states: an output that is filled with one value has no bytes until it is touched.
extern thread_local bool tl_making_states;
// The number of the call of a compiled graph that this thread is in, if that is the forward of a training; 0: it is in
// none. Such a graph runs without gradient mode, and a backward needs its tensors.
extern thread_local uint64_t tl_compiled_forward;
// The number of the call of a compiled graph that is paged launch by launch and that this thread is in; 0: it is in
// none.
extern thread_local uint64_t tl_compiled_graph;
// Calls of raw readers that this thread is in. They have declared their writes.
extern thread_local int tl_readers;

class Depth {
 public:
  Depth() : depth_(tl_depth) { ++depth_; }
  ~Depth() { --depth_; }
  bool outermost() const { return depth_ == 1; }
  Depth(const Depth&) = delete;
  Depth& operator=(const Depth&) = delete;

 private:
  int& depth_;  // looking up this thread's costs more than keeping the reference
};

// Above 0 while this thread runs a recipe.
extern thread_local int tl_running_recipes;

class ForeignScope;
// Set while C++ that is not torch's runs in this thread (guards/extension_ops.h).
extern thread_local ForeignScope* tl_foreign;

// Returns true for a thread on which a backend runs its works: their outputs are the backend's own (rule 5).
bool is_backends_thread();

}  // namespace memmgr::pager
