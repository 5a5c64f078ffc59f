// Running recipes again (rule 10).
#pragma once

#include <unordered_map>
#include <vector>

#include "base/tensors.h"
#include "cells/types.h"

namespace memmgr::pager {

// Makes the bytes of the evicted cell `c`, which the caller has busy. Iterative: each op runs once, and results for
// other evicted cells are given to them. No lock is held. Throws c10::OutOfMemoryError, or a c10::Error with the
// reason.
at::DataPtr rematerialize(Cell* c);

// Runs the recipe over its resident inputs, in memory of the pool full of `fill` (-1: as allocated), and returns its
// results; none if an input cannot be had. `before`: the bytes that the op wrote to, as they were, for each tensor in
// the order of the arguments. An op takes them, a launch copies them.
std::vector<StoragePtr> run_over_inputs(Pool& pool, const Recipe& r, std::vector<StoragePtr>& before, int fill);

struct KeptRow {  // a ghost that one group makes and a later one reads
  uint32_t made, read, ordinal;
};

// The cells of a group by the plan's ordinals. Each function is called under the graph's lock.
struct GroupPlan {
  Cell* (*cell_of)(uint32_t ordinal);
  bool (*was)(const Version* v, uint32_t ordinal);  // true: the version was that cell's
  void (*has_been_read)(const Recipe* r);           // a recipe has run for other cells of the group
};

// Cells that a plan rematerializes together, before the op at this position. While it lives, ghosts that this thread
// makes are kept until the group has read them for the last time. `keep`: ghosts that are kept for later groups.
class RematGroup {
 public:
  RematGroup(const GroupPlan& plan, const std::vector<uint32_t>& ordinals, uint32_t position,
             std::vector<KeptRow> keep);
  ~RematGroup();
  RematGroup(const RematGroup&) = delete;
  RematGroup& operator=(const RematGroup&) = delete;

  bool reads_later_locked(const Version* v) const REQUIRES(graph_lock());
  bool may_keep_locked(const Version* v) REQUIRES(graph_lock());
  void has_run_locked(const Recipe* r) REQUIRES(graph_lock());
  // Called after one of its cells was restored. Frees the ghosts that no other cell of the group reads, except those
  // that are kept for later groups.
  void end_read();

 private:
  std::vector<KeptRow>::iterator row_for(const Version* v);

  const GroupPlan plan_;
  std::unordered_map<const Version*, uint32_t> reads_;  // reads that are still to come
  uint32_t position_;
  std::vector<KeptRow> keep_;
};
// Frees all kept intermediates: later uses rematerialize them. Returns the bytes.
uint64_t end_kept_ghosts();

}  // namespace memmgr::pager
