#include "python/fork.h"

#include <ATen/record_function.h>
#include <pthread.h>
#include <sched.h>

#include <vector>

#include "base/at_fork.h"
#include "base/budget.h"
#include "base/deferred_drop.h"
#include "base/events.h"
#include "cells/cell.h"
#include "cells/freeze.h"
#include "cells/types.h"
#include "concurrency/admission.h"
#include "ops/rng.h"
#include "plan/timeline.h"
#include "pools/pool.h"
#include "residency/transfer.h"

namespace memmgr::pager {

namespace {

bool try_all(const std::vector<std::mutex*>& all) {
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i]->try_lock()) continue;
    while (i-- > 0) all[i]->unlock();
    return false;
  }
  return true;
}

// They nest in more than one order, so nobody waits for one while having another.
void before_fork() {
  // A thread's first op copies torch's list of observers under a lock of torch's, which needs malloc as soon as there
  // is one observer, and malloc is what a fork stops others in: a child would find that lock taken. So the thread that
  // forks copies it now, and its child has no need to. (What a thread made in the child does first may still wait for
  // ever.)
  at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  fork_locks().lock.lock();
  for (;;) {
    try {
      if (transfers_under_way()) finish_transfers();  // the child has nobody who would
    } catch (const std::exception&) {
    }
    while (!try_all(fork_locks().all)) sched_yield();
    if (!transfers_under_way()) return;
    for (std::mutex* m : fork_locks().all) m->unlock();
  }
}

void after_fork_in_parent() {
  for (std::mutex* m : fork_locks().all) m->unlock();
  fork_locks().lock.unlock();
}

void after_fork_in_child() {
  after_fork_in_parent();
  new (&residency_changed()) std::condition_variable;
  new (&drawing_lock()) std::mutex;  // held while an op draws, and guards nothing of ours
  forget_admission_in_child();
  forget_dropper_in_child();
  forget_watch_in_child();
  if (!budget.arena) return;
  budget.forked = true;
  budget.pool->forget_in_child();  // also where a budget was just ending: it closes before the pool goes
  if (!budget.open) return;
  stay_in_child();
  timeline_on = false;
  // Who had them busy is not here. Bytes and residency change hands in one step under the lock, so one or the other
  // holds: they are in memory, or still away.
  for_each_cell_locked([](Cell* c) { c->state.fetch_and(~kBusy); });
}

}  // namespace

void watch_forks() {
  static const int once = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  (void)once;
}

}  // namespace memmgr::pager
