// The meter for ctypes. All counts of one reading as a flat row of numbers, in
// the order of the struct.
#include <cstring>

#include "meter.h"

using memmgr::Meter;

#define VISIBLE extern "C" __attribute__((visibility("default")))

VISIBLE Meter *meter_new(mm_device *device, uint64_t least_total) {
  return new Meter(device, least_total);
}
VISIBLE void meter_delete(Meter *meter) { delete meter; }
VISIBLE void meter_allocated(Meter *meter, const void *p, size_t requested) {
  meter->Allocated(p, requested);
}
VISIBLE void meter_freed(Meter *meter, const void *p) { meter->Freed(p); }
VISIBLE void meter_failed(Meter *meter) { meter->Failed(); }
VISIBLE void meter_retried(Meter *meter) { meter->Retried(); }
VISIBLE void meter_reset_peaks(Meter *meter) { meter->ResetPeaks(); }
VISIBLE void meter_reset_sums(Meter *meter) { meter->ResetSums(); }
VISIBLE void meter_set_budget(Meter *meter, uint64_t bytes) {
  meter->SetBudget(bytes);
}
VISIBLE void meter_set_fraction(Meter *meter, double fraction) {
  meter->SetFraction(fraction);
}
VISIBLE double meter_fraction(Meter *meter) { return meter->fraction(); }
VISIBLE uint64_t meter_total(Meter *meter) { return meter->total_bytes(); }
VISIBLE int64_t meter_live(Meter *meter) { return meter->live_bytes(); }

VISIBLE size_t meter_read(Meter *meter, int64_t *out, size_t capacity) {
  const memmgr::MemoryStats now = meter->Stats();
  static_assert(sizeof now % sizeof *out == 0);
  const size_t count = sizeof now / sizeof *out;
  if (count <= capacity)
    std::memcpy(out, &now, sizeof now);
  return count;
}

// Calls back with each piece, and with the segment that it belongs to.
VISIBLE void meter_walk(Meter *meter,
                        void (*visit)(uint64_t segment, uint64_t segment_bytes,
                                      uint64_t requested_bytes,
                                      uint64_t live_bytes, uint64_t address,
                                      uint64_t bytes, uint64_t piece_requested,
                                      int live)) {
  for (const memmgr::Segment &s : meter->Segments())
    for (const memmgr::Piece &p : s.pieces)
      visit(s.address, s.bytes, s.requested_bytes, s.live_bytes, p.address,
            p.bytes, p.requested_bytes, p.live ? 1 : 0);
}
