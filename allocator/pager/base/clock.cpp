#include "base/clock.h"

#include <atomic>
#include <ctime>

#include "memmgr/device.h"

namespace memmgr::pager {

const uint64_t* const device_clock = mm_device_clock();

static std::atomic<uint64_t (*)()> other{nullptr};

void read_clock(uint64_t (*nanoseconds)()) { other = nanoseconds; }

uint64_t now_ns() {
  if (uint64_t (*nanoseconds)() = other.load(std::memory_order_relaxed)) return nanoseconds();
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000ull + static_cast<uint64_t>(t.tv_nsec);
}

#if defined(__x86_64__)
static uint64_t clock_ticks() { return __builtin_ia32_rdtsc(); }
#else
static uint64_t clock_ticks() { return now_ns(); }
#endif

static std::atomic<uint64_t> each_look{0}, counted{0};

uint64_t ticks() {
  if (uint64_t (*nanoseconds)() = other.load(std::memory_order_relaxed)) return nanoseconds();
  const uint64_t step = each_look.load(std::memory_order_relaxed);
  return step ? counted.fetch_add(step, std::memory_order_relaxed) + step : clock_ticks();
}

void count_ticks(uint64_t step) {
  if (each_look.load() == 0) counted = clock_ticks();
  while (step == 0 && each_look.load() && clock_ticks() < counted.load()) {
  }
  each_look = step;
}

double seconds_of_ticks(uint64_t n) {
  if (other.load(std::memory_order_relaxed) != nullptr) return static_cast<double>(n) * 1e-9;
  static const double each = [] {
    const uint64_t t0 = now_ns(), c0 = clock_ticks();
    while (now_ns() - t0 < 2000000) {
    }
    return static_cast<double>(now_ns() - t0) * 1e-9 / static_cast<double>(clock_ticks() - c0);
  }();
  return static_cast<double>(n) * each;
}

}  // namespace memmgr::pager
