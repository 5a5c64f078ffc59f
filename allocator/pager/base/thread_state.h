// Where in an op a thread is.
#pragma once

namespace memmgr::pager {

// Ops that are under way in this thread: an op inside another has been admitted with it.
extern thread_local int tl_depth;
// Compiled regions that this thread is in: what they were given is pinned, what they make is theirs until they return.
extern thread_local int tl_regions;
// An optimizer makes its states: what is filled with one value has no bytes until somebody touches it.
extern thread_local bool tl_making_states;
// Calls of raw readers that this thread is in: they have said what they write.
extern thread_local int tl_readers;

class Depth {
 public:
  Depth() : depth_(tl_depth) { ++depth_; }
  ~Depth() { --depth_; }
  bool outermost() const { return depth_ == 1; }
  Depth(const Depth&) = delete;
  Depth& operator=(const Depth&) = delete;

 private:
  int& depth_;  // where this thread's is costs more to ask than to remember
};

// Above 0 while this thread runs a recipe.
extern thread_local int tl_running_recipes;

class ForeignScope;
// C++ that is not torch's runs in this thread (guards/extension_ops.h); null: none.
extern thread_local ForeignScope* tl_foreign;

// A thread on which a backend runs its works: what it makes there is its own (rule 5).
bool is_backends_thread();

}  // namespace memmgr::pager
