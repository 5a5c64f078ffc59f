#include "python/bind_pool.h"

// The Python module's functions for the pool and the tier: figures, and a measurement of a copy's speed.
#include <cstdlib>
#include <cstring>
#include <optional>

#include "base/clock.h"
#include "base/gil.h"
#include "dispatch/the_session.h"
#include "pools/pool.h"

namespace memmgr::pager {

struct ProbeSeconds {
  double write, read, cpu;
};

FIELDS(ProbeSeconds, "A write and a read of the tier, and the processor time of both.", write, read, cpu)

namespace {

void py_add_outside(int64_t delta) {
  if (the_session.arena) mm_arena_add_outside(the_session.arena, delta);
}

uint64_t py_resident() { return the_session.arena ? mm_arena_resident(the_session.arena) : 0; }

void py_set_limit(uint64_t bytes) {
  if (the_session.open) the_session.pool->set_budget(bytes);
}

Figures py_arena_stats() {
  mm_arena_stats a{};
  if (the_session.arena) mm_arena_stats_get(the_session.arena, &a);
  Figures d;
  d.put("budget_bytes", a.budget_bytes);
  d.put("live_bytes", a.live_bytes);
  d.put("outside_bytes", a.outside_bytes);
  d.put("resident_peak_bytes", a.resident_peak_bytes);
  d.put("unmanaged_peak_bytes", a.unmanaged_peak_bytes);
  d.put("committed_peak_bytes", a.committed_peak_bytes);
  d.put("reclaims", a.reclaims);
  d.put("search_nanoseconds", a.search_nanoseconds);
  d.put("longest_run_bytes", a.longest_run_bytes);
  d.put("placeable_bytes", a.placeable_bytes);
  return d;
}

Figures py_tier_stats() {
  Figures d;
  if (!the_session.tier_writes) return d;
  mm_tier_stats t{};
  mm_tier_stats_get(the_session.tier, &t);
  d.put("capacity_bytes", t.capacity_bytes);
  d.put("used_bytes", t.used_bytes);
  d.put("used_peak_bytes", t.used_peak_bytes);
  d.put("file_bytes", t.file_bytes);
  d.put("written_bytes", t.written_bytes);
  d.put("read_bytes", t.read_bytes);
  d.put("errors", t.errors);
  d.put("cpu_nanoseconds", t.cpu_nanoseconds);
  d.put("lock_nanoseconds", t.lock_nanoseconds);
  d.put("direct", static_cast<uint64_t>(t.direct));
  return d;
}

std::optional<ProbeSeconds> py_tier_probe(size_t n) {
  if (!the_session.tier_writes) return std::nullopt;
  const bool on_host = the_session.pool->on_host();
  const OwnWork own;
  void* p = nullptr;
  at::DataPtr block;
  if (!on_host)
    p = (block = the_session.pool->try_allocate(n, 0)).get();
  else if (posix_memalign(&p, 4096, n) != 0)
    p = nullptr;
  if (!p) return std::nullopt;
  const WithoutGil released;
  uint64_t read = 0;
  mm_tier_stats before{}, after{};
  if (on_host) std::memset(p, 1, n);
  mm_tier_stats_get(the_session.tier, &before);
  const uint64_t begun = now_ns();
  const int64_t slot = mm_tier_write_now(the_session.tier, p, n);
  if (slot >= 0) mm_tier_wait(the_session.tier, slot);
  const uint64_t written = now_ns();
  if (slot >= 0) {
    if (mm_tier_read_now(the_session.tier, slot, p) == 0 && mm_tier_wait(the_session.tier, slot) >= 0) read = now_ns();
    mm_tier_free(the_session.tier, slot);
  }
  mm_tier_stats_get(the_session.tier, &after);
  if (on_host) free(p);
  block.clear();
  if (!on_host) mm_arena_reset_peak(the_session.arena);  // the block counted in the budget, but not in the run
  if (!read) return std::nullopt;
  return ProbeSeconds{static_cast<double>(written - begun) * 1e-9, static_cast<double>(read - written) * 1e-9,
                      static_cast<double>(after.cpu_nanoseconds - before.cpu_nanoseconds) * 1e-9};
}

void py_tier_inject(int write, int after_writes, int read, int after_reads) {
  if (the_session.tier) mm_tier_inject(the_session.tier, write, after_writes, read, after_reads);
}

}  // namespace

void bind_pool(Module& m) {
  m.def<&py_add_outside>("add_outside", "delta", "Bytes that are on the device, and not of the pool.");
  m.def<&py_set_limit>("set_limit", "limit_bytes",
                       "The limit of the open budget from now on. `settle` evicts cells beyond it.");
  m.def<&py_resident>("resident", "", "Bytes on the device.");
  m.def<&py_arena_stats>("arena_stats", "", "The pool's figures.");
  m.def<&py_tier_stats>("tier_stats", "", "The tier's figures; empty without a tier.");
  m.def<&py_tier_probe>("tier_probe", "size", "Writes and reads so many bytes; None: there is no room for it.");
  m.def<&py_tier_inject>("tier_inject", "*, write=0, after_writes=0, read=0, after_reads=0",
                         "Lets writes and reads of the tier fail with these errors (errno). For tests.");
}

}  // namespace memmgr::pager
