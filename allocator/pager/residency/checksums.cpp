#include "residency/checksums.h"

#include <cerrno>
#include <string>

#include "base/errors.h"
#include "base/lock.h"
#include "cells/cell.h"
#include "cells/mapped_range.h"
#include "pools/pool.h"
#include "recipes/op_signature.h"

namespace memmgr::pager {

bool sum_agrees(Cell* c, const void* data) {
  return sample_agrees(c, data) && (!c->checksum.taken() || c->pool->sum(data, c->nbytes) == c->checksum.value());
}

void check_sum(Cell* c, const void* data) {
  if (sum_agrees(c, data)) return;
  if (has_file_copy(c) && c->absence == Absence::kOffloaded) throw_file_failed(c, ESTALE);
  bool untried = false;
  if (c->absence == Absence::kEvicted) {
    const Hold lock(graph_lock());
    const Recipe* r = c->version ? c->version->recipe : nullptr;
    untried = r && r->checked;
    if (untried) refuse_families_locked(r);
  }
  throw WrongBytes({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                   "memmgr: " + std::to_string(c->nbytes) + " bytes came back other than they left (" +
                       (c->absence == Absence::kEvicted ? "rematerialized" : "read back") +
                       "). The run must not go on with them; please report this." +
                       (untried ? " With verify=True every op is tried in each of its sizes first." : ""));
}

}  // namespace memmgr::pager
