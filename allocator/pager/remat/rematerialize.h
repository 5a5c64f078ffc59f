// Running recipes again (rule 10).
#pragma once

#include <unordered_map>
#include <vector>

#include "base/tensors.h"
#include "cells/types.h"

namespace memmgr::pager {

// Makes the bytes of `c`, which is evicted and which the caller has busy. Iterative; each op runs once; what comes out
// on the way for other evicted cells goes to them. No lock is held. Throws c10::OutOfMemoryError, or a c10::Error that
// says what went wrong.
at::DataPtr rematerialize(Cell* c);

// The recipe's results once more, over the inputs that are there, in memory full of `fill` (-1: as it comes); none
// where one of them is gone. `before`: what the op wrote to, as it was.
std::vector<StoragePtr> run_over_inputs(const Recipe& r, StoragePtr before, int fill);

struct KeptRow {  // ghosts that one group of rematerializations makes and a later one reads
  uint32_t made, read, ordinal;
};

// The plan of a group: what its ordinals name. Each function is called under the graph's lock.
struct GroupPlan {
  Cell* (*cell_of)(uint32_t ordinal);
  bool (*was)(const Version* v, uint32_t ordinal);  // the version was that cell's
  void (*has_been_read)(const Recipe* r);           // a recipe has run for others of the group
};

// Cells that a plan makes again together, before the op at this position. While it lives, what this thread makes on the
// way stays until the last of them that is made of it has been. `keep`: what stays for later groups.
class RematGroup {
 public:
  RematGroup(const GroupPlan& plan, const std::vector<uint32_t>& ordinals, uint32_t position,
             std::vector<KeptRow> keep);
  ~RematGroup();
  RematGroup(const RematGroup&) = delete;
  RematGroup& operator=(const RematGroup&) = delete;

  bool reads_later_locked(const Version* v) const;
  bool may_keep_locked(const Version* v);
  void has_run_locked(const Recipe* r);
  // One of its cells is back: what no other is made of ends, but for what stays for later groups.
  void end_read();

 private:
  std::vector<KeptRow>::iterator row_for(const Version* v);

  const GroupPlan plan_;
  std::unordered_map<const Version*, uint32_t> reads_;  // that are to come
  uint32_t position_;
  std::vector<KeptRow> keep_;
};
// Ends all that stays so: whoever counts on it makes it again. Returns the bytes.
uint64_t end_kept_ghosts();

}  // namespace memmgr::pager
