#include "base/link.h"

#include <algorithm>
#include <atomic>
#include <utility>

namespace memmgr::pager {

static std::atomic<double> write_link{1e-9}, read_link{1e-9}, cpu_link{1e-10};

Link link() {
  return {write_link.load(std::memory_order_relaxed), read_link.load(std::memory_order_relaxed),
          cpu_link.load(std::memory_order_relaxed)};
}

void set_link(double seconds_per_byte) {
  write_link.store(seconds_per_byte);
  read_link.store(seconds_per_byte);
}

void set_link_cpu(double seconds_per_byte) { cpu_link.store(seconds_per_byte); }

static void note_link(std::atomic<double>& figure, uint64_t nbytes, uint64_t ns) {
  if (nbytes == 0) return;
  const double before = figure.load(std::memory_order_relaxed);
  const double now = static_cast<double>(ns) * 1e-9 / static_cast<double>(nbytes);
  // A copy during a burst of the other direction, or of a thread that did not run, predicts little.
  const double likely = std::clamp(now, before / 4, before * 4);
  figure.store(before + (likely - before) / 32, std::memory_order_relaxed);
}

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
  note_link(write_link, written, now.write_nanoseconds - seen.write_nanoseconds);
  note_link(read_link, read, now.read_nanoseconds - seen.read_nanoseconds);
  note_link(cpu_link, written + read, now.cpu_nanoseconds - seen.cpu_nanoseconds);
}

}  // namespace memmgr::pager
