#include "concurrency/admission.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <vector>

#include "base/clock.h"
#include "base/gil.h"
#include "base/lock.h"
#include "base/no_destructor.h"
#include "cells/cell.h"
#include "concurrency/python_threads.h"

namespace memmgr::pager {

namespace {

// Bytes that the admitted ops have asked for, with the number of these ops in the upper bits: one addition changes
// both.
constexpr int kOpsShift = 48;
constexpr uint64_t kOneOp = uint64_t{1} << kOpsShift;

constexpr uint64_t kRestsNs = 1'000'000'000;

struct Admission {
  std::atomic<uint64_t> running{0};
  std::atomic<int> waiting{0};
  Lock& lock = lock_of(LockId::kAdmission);
  Condition changed;
  std::vector<unsigned long> foreign GUARDED_BY(lock);  // threads in ops of other libraries
};

NoDestructor<Admission> admission;

bool fits(mm_arena* arena, uint64_t running) {
  const uint64_t bytes = running & (kOneOp - 1);
  const uint64_t limit = mm_arena_budget(arena);
  if (limit == MM_UNLIMITED) return true;
  const uint64_t all = mm_arena_resident(arena), paged = totals.resident_cell_bytes.load();
  const uint64_t fixed = all - std::min(all, paged);
  return bytes + fixed <= limit;
}

// True if all ops under way belong to other libraries and their threads sleep. One waiting thread calls it repeatedly.
bool all_foreign_and_rest_locked(const Admission& a, std::vector<Sleeper>* sleepers) REQUIRES(a.lock) {
  if (a.foreign.empty() || a.running.load() >> kOpsShift != a.foreign.size()) {
    sleepers->clear();
    return false;
  }
  const bool same = std::equal(a.foreign.begin(), a.foreign.end(), sleepers->begin(), sleepers->end(),
                               [](unsigned long thread, const Sleeper& s) { return thread == s.system_thread; });
  if (!same) {
    sleepers->clear();
    for (const unsigned long thread : a.foreign) sleepers->push_back({thread});
  }
  const uint64_t now = now_ns();
  bool all = true;
  for (Sleeper& s : *sleepers) all &= rests(&s, now, kRestsNs);
  return all;
}

}  // namespace

Admitted::Admitted(Session& session, uint64_t bytes, bool alone, bool foreign)
    : asked_(kOneOp + std::min(bytes, kOneOp / 256)) {
  Admission& a = *admission;
  wait_for_admission(session, alone);
  if (C10_LIKELY(!foreign)) return;
  foreign_ = static_cast<unsigned long>(syscall(SYS_gettid));
  const Hold lock(a.lock);
  a.foreign.push_back(foreign_);
}

void Admitted::wait_for_admission(Session& session, bool alone) {
  Admission& a = *admission;
  const auto may_run = [&] {
    const uint64_t running = a.running.fetch_add(asked_) + asked_;
    if (C10_LIKELY(running >> kOpsShift == 1 || (!alone && fits(session.arena, running)))) return true;
    a.running.fetch_sub(asked_);
    return false;
  };
  if (C10_LIKELY(may_run())) return;
  WithoutGil released;
  Hold lock(a.lock);
  a.waiting++;
  std::vector<Sleeper> sleepers;
  // Bounded, because fixed bytes change without a notification.
  while (!may_run()) {
    if (all_foreign_and_rest_locked(a, &sleepers)) {
      a.running.fetch_add(asked_);
      break;
    }
    a.changed.wait_for(lock, std::chrono::milliseconds(5));
  }
  a.waiting--;
}

Admitted::~Admitted() {
  Admission& a = *admission;
  if (C10_UNLIKELY(foreign_)) {
    const Hold lock(a.lock);
    a.foreign.erase(std::find(a.foreign.begin(), a.foreign.end(), foreign_));
  }
  a.running.fetch_sub(asked_);
  if (C10_UNLIKELY(a.waiting.load(std::memory_order_relaxed) > 0)) {
    const Hold lock(a.lock);
    a.changed.notify_all();
  }
}

static const bool renews_admission = in_forked_child([] { admission->waiting = 0; });

bool others_are_running(bool inside) { return admission->running.load() >> kOpsShift > (inside ? 1 : 0); }

void wait_for_others(double seconds) {
  Admission& a = *admission;
  WithoutGil released;
  Hold lock(a.lock);
  a.waiting++;
  a.changed.wait_for(lock, std::chrono::duration<double>(seconds));
  a.waiting--;
}

}  // namespace memmgr::pager
