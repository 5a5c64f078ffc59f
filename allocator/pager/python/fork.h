// Forks. The pager of a forked child only restores. Cells that were absent at the fork are restored from memory,
// recipes and the parent's file, all of which the child has inherited (core/heirs.h). No cell is evicted, no op is
// recorded and no thread runs.
#pragma once

namespace memmgr::pager {

void watch_forks();

}  // namespace memmgr::pager
