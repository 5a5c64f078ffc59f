#include "admission.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "budget.h"
#include "cell.h"
#include "reclaim.h"
#include "threads.h"

namespace memmgr::pager {

namespace {

struct Admission {
  std::atomic<uint64_t> bytes{0};
  std::atomic<int> ops{0};
  std::atomic<int> waiting{0};
  std::mutex lock;
  std::condition_variable changed;
};

Admission& admission() {
  static auto* a = new Admission;
  return *a;
}

bool fits(uint64_t bytes) {
  const uint64_t limit = mm_arena_budget(budget.arena);
  if (limit == MM_UNLIMITED) return true;
  const uint64_t all = mm_arena_resident(budget.arena), paged = resident_cell_bytes.load(std::memory_order_relaxed);
  const uint64_t fixed = all - std::min(all, paged);
  return bytes + fixed <= limit;
}

}  // namespace

Admitted::Admitted(uint64_t bytes, bool alone) : bytes_(bytes) {
  Admission& a = admission();
  const uint64_t total = a.bytes.fetch_add(bytes) + bytes;
  const int ops = a.ops.fetch_add(1) + 1;
  if (C10_LIKELY(ops == 1 || (!alone && fits(total)))) return;
  a.bytes.fetch_sub(bytes);
  a.ops.fetch_sub(1);
  counters.admission_waits++;
  WithoutGil released;
  std::unique_lock<std::mutex> lock(a.lock);
  a.waiting++;
  for (;;) {
    const uint64_t now = a.bytes.fetch_add(bytes) + bytes;
    const int running = a.ops.fetch_add(1) + 1;
    if (running == 1 || (!alone && fits(now))) break;
    a.bytes.fetch_sub(bytes);
    a.ops.fetch_sub(1);
    // Bounded, because what is fixed changes without anybody's telling.
    a.changed.wait_for(lock, std::chrono::milliseconds(5));
  }
  a.waiting--;
}

Admitted::~Admitted() {
  Admission& a = admission();
  a.bytes.fetch_sub(bytes_);
  a.ops.fetch_sub(1);
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

bool others_are_running() { return admission().ops.load() > (tl_depth > 0 ? 1 : 0); }

void wait_for_others(double seconds) {
  Admission& a = admission();
  WithoutGil released;
  std::unique_lock<std::mutex> lock(a.lock);
  a.waiting++;
  a.changed.wait_for(lock, std::chrono::duration<double>(seconds));
  a.waiting--;
}

}  // namespace memmgr::pager
