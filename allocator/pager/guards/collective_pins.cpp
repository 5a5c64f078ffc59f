#include "guards/collective_pins.h"

#include <algorithm>
#include <list>

#if __has_include(<torch/csrc/distributed/c10d/Work.hpp>)
#include <torch/csrc/distributed/c10d/Work.hpp>

#define MEMMGR_HAS_WORKS
#endif

#include "base/lock.h"
#include "base/no_destructor.h"
#include "cells/cell.h"
#include "cells/lifetime.h"

namespace memmgr::pager {

namespace {

using Target = c10::intrusive_ptr_target;

struct InFlight {
  c10::weak_intrusive_ptr<Target> work;
  std::vector<Cell*> pinned;
};

struct Works {
  Lock& lock = lock_of(LockId::kWorks);
  std::list<InFlight> all GUARDED_BY(lock);
  std::atomic<size_t> count{0};
};

NoDestructor<Works> works;

// Some backends report the end in wait() only, and some never.
bool completed(Target* work) {
#ifdef MEMMGR_HAS_WORKS
  auto* w = dynamic_cast<c10d::Work*>(work);
  return w && w->isCompleted();
#else
  return false;
#endif
}

// Removes the works for which `ended` returns true, and ends their pins.
template <class Ended>
void end_works(Ended&& ended) {
  std::vector<Cell*> done;
  std::list<InFlight> gone;  // the last reference to a work frees its tensors: outside of the lock
  {
    Works& w = *works;
    const Hold lock(w.lock);
    for (auto it = w.all.begin(); it != w.all.end();) {
      if (!ended(it->work)) {
        ++it;
        continue;
      }
      done.insert(done.end(), it->pinned.begin(), it->pinned.end());
      gone.splice(gone.end(), w.all, it++);
    }
    w.count = w.all.size();
  }
  if (done.empty()) return;
  {
    const Hold lock(graph_lock());
    for (Cell* c : done) end_long_pin_locked(c);
  }
  for (Cell* c : done) unpin(c);
}

}  // namespace

void keep_until_done(const c10::intrusive_ptr<Target>& work, std::vector<Cell*> pinned) {
  {
    const Hold lock(graph_lock());
    for (Cell* c : pinned) begin_long_pin_locked(c);
  }
  Works& w = *works;
  const Hold lock(w.lock);
  w.all.push_back({c10::weak_intrusive_ptr<Target>(work), std::move(pinned)});
  w.count = w.all.size();
}

void poll_works() {
  // Called without the lock: a Work that is written in Python takes the GIL.
  std::vector<c10::intrusive_ptr<Target>> living;
  {
    Works& w = *works;
    const Hold lock(w.lock);
    for (const InFlight& flight : w.all)
      if (auto work = flight.work.lock()) living.push_back(std::move(work));
  }
  std::vector<const Target*> done;
  for (const auto& work : living)
    if (completed(work.get())) done.push_back(work.get());
  end_works([&](const auto& weak) {
    return weak.expired() || std::find(done.begin(), done.end(), weak._unsafe_get_target()) != done.end();
  });
}

void forget_works() {
  end_works([](const auto&) { return true; });
}

size_t works_in_flight() { return works->count.load(); }

}  // namespace memmgr::pager
