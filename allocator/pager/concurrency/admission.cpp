#include "concurrency/admission.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "base/budget.h"
#include "base/gil.h"
#include "cells/cell.h"

namespace memmgr::pager {

namespace {

// Bytes that the admitted ops have asked for, with the number of these ops in the upper bits: one addition changes
// both.
constexpr int kOpsShift = 48;
constexpr uint64_t kOneOp = uint64_t{1} << kOpsShift;

struct Admission {
  std::atomic<uint64_t> running{0};
  std::atomic<int> waiting{0};
  std::mutex lock;
  std::condition_variable changed;
};

Admission& admission() {
  static auto* a = new Admission;
  return *a;
}

bool fits(uint64_t running) {
  const uint64_t bytes = running & (kOneOp - 1);
  const uint64_t limit = mm_arena_budget(budget.arena);
  if (limit == MM_UNLIMITED) return true;
  const uint64_t all = mm_arena_resident(budget.arena), paged = resident_cell_bytes.load();
  const uint64_t fixed = all - std::min(all, paged);
  return bytes + fixed <= limit;
}

}  // namespace

Admitted::Admitted(uint64_t bytes, bool alone) : asked_(kOneOp + std::min(bytes, kOneOp / 256)) {
  Admission& a = admission();
  const auto may_run = [&] {
    const uint64_t running = a.running.fetch_add(asked_) + asked_;
    if (C10_LIKELY(running >> kOpsShift == 1 || (!alone && fits(running)))) return true;
    a.running.fetch_sub(asked_);
    return false;
  };
  if (C10_LIKELY(may_run())) return;
  counters.admission_waits++;
  WithoutGil released;
  std::unique_lock<std::mutex> lock(a.lock);
  a.waiting++;
  // Bounded, because fixed bytes change without a notification.
  while (!may_run()) a.changed.wait_for(lock, std::chrono::milliseconds(5));
  a.waiting--;
}

Admitted::~Admitted() {
  Admission& a = admission();
  a.running.fetch_sub(asked_);
  if (C10_UNLIKELY(a.waiting.load(std::memory_order_relaxed) > 0)) {
    std::lock_guard<std::mutex> lock(a.lock);
    a.changed.notify_all();
  }
}

void forget_admission_in_child() {
  Admission& a = admission();
  new (&a.lock) std::mutex;
  new (&a.changed) std::condition_variable;
  a.waiting = 0;
}

bool others_are_running(bool inside) { return admission().running.load() >> kOpsShift > (inside ? 1 : 0); }

void wait_for_others(double seconds) {
  Admission& a = admission();
  WithoutGil released;
  std::unique_lock<std::mutex> lock(a.lock);
  a.waiting++;
  a.changed.wait_for(lock, std::chrono::duration<double>(seconds));
  a.waiting--;
}

}  // namespace memmgr::pager
