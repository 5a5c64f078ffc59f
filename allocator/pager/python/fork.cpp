#include "python/fork.h"

#include <ATen/record_function.h>
#include <pthread.h>

#include "base/forked_child.h"
#include "base/lock.h"
#include "cells/cell.h"
#include "cells/freeze.h"
#include "cells/types.h"
#include "dispatch/the_session.h"
#include "plan/timeline.h"
#include "pools/pool.h"
#include "residency/checksums.h"
#include "residency/transfer.h"

namespace memmgr::pager {

namespace {

void before_fork() {
  // A thread's first op copies torch's list of observers under a lock of torch's. Once there is an observer, that copy
  // needs malloc, which a fork blocks in other threads: a child would find torch's lock taken. So the thread that forks
  // makes its copy now, and its child needs none. (A thread that the child starts may still wait for ever at its first
  // op.)
  at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  for (;;) {
    try {
      if (transfers_under_way()) finish_transfers(the_session);  // the child has no thread that would end them
    } catch (const std::exception&) {
    }
    take_locks_for_fork();
    if (!transfers_under_way()) return;
    give_locks_after_fork();
  }
}

void after_fork_in_child() {
  give_locks_after_fork();
  renew_after_fork();
  if (!the_session.arena) return;
  forked_child = true;
  forget_comparisons();
  the_session.pool->forget_in_child();  // also if a budget was just ending: it closes before its pool ends
  if (!the_session.open) return;
  stay_in_child(the_session.options);
  timeline_on = false;
  // The threads that had cells busy are not in the child. Bytes and residency change in one step under the lock: each
  // cell is either resident or absent.
  const Hold lock(graph_lock());
  for_each_cell_locked([](Cell* c) { c->state.fetch_and(~kBusy); });
}

}  // namespace

void watch_forks() {
  static const int once = pthread_atfork(before_fork, give_locks_after_fork, after_fork_in_child);
  (void)once;
}

}  // namespace memmgr::pager
