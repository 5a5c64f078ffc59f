#include "base/link.h"

#include <algorithm>
#include <atomic>
#include <utility>

namespace memmgr::pager {

namespace {

struct Rate {
  std::atomic<double> seconds_per_byte;
  double mean_bytes OF_GRAPH = 0;  // of the latest copies; 0: there was none
};

Rate write_link{1e-9}, read_link{1e-9}, cpu_link{1e-10};

// The rate becomes the time of the latest copies over their bytes: a small copy, which takes longer for each byte,
// counts for as little as it moves.
void note_copy_locked(Rate& rate, uint64_t nbytes, uint64_t ns) REQUIRES(graph_lock()) {
  if (nbytes == 0) return;
  constexpr double kWeight = 1.0 / 32;
  const double before = rate.seconds_per_byte.load(std::memory_order_relaxed);
  const auto bytes = static_cast<double>(nbytes);
  // A copy during a burst of the other direction, or of a thread that did not run, predicts little.
  const double seconds = std::clamp(static_cast<double>(ns) * 1e-9, before * bytes / 4, before * bytes * 4);
  const double of_mean = (1 - kWeight) * (rate.mean_bytes > 0 ? rate.mean_bytes : bytes);
  rate.mean_bytes = of_mean + kWeight * bytes;
  rate.seconds_per_byte.store((of_mean * before + kWeight * seconds) / rate.mean_bytes, std::memory_order_relaxed);
}

}  // namespace

Link link() {
  return {write_link.seconds_per_byte.load(std::memory_order_relaxed),
          read_link.seconds_per_byte.load(std::memory_order_relaxed),
          cpu_link.seconds_per_byte.load(std::memory_order_relaxed)};
}

void set_link(double seconds_per_byte) {
  write_link.seconds_per_byte.store(seconds_per_byte);
  read_link.seconds_per_byte.store(seconds_per_byte);
}

void set_link_cpu(double seconds_per_byte) { cpu_link.seconds_per_byte.store(seconds_per_byte); }

// Measured by the tier's own clock, so that copies that no thread waits for count, too.
void note_link_locked(mm_tier* tier) {
  static const mm_tier* seen_of = nullptr;  // the tier of the last call
  static mm_tier_stats last{};
  mm_tier_stats now{};
  mm_tier_stats_get(tier, &now);
  const mm_tier_stats seen = std::exchange(last, now);
  if (std::exchange(seen_of, tier) != tier || now.written_bytes < seen.written_bytes ||
      now.read_bytes < seen.read_bytes)
    return;  // another tier
  const uint64_t written = now.written_bytes - seen.written_bytes, read = now.read_bytes - seen.read_bytes;
  note_copy_locked(write_link, written, now.write_nanoseconds - seen.write_nanoseconds);
  note_copy_locked(read_link, read, now.read_nanoseconds - seen.read_nanoseconds);
  note_copy_locked(cpu_link, written + read, now.cpu_nanoseconds - seen.cpu_nanoseconds);
}

}  // namespace memmgr::pager
