// The C ABI: casts, and nothing that C++ throws gets past it.
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include <exception>
#include <new>
#include <string>

#include "arena.h"
#include "bits.h"
#include "device.h"
#include "file_tier.h"
#include "guarded.h"
#include "host_tier.h"
#include "ladder_tier.h"

namespace {

using memmgr::Guarded;
using memmgr::Say;

memmgr::Arena* Of(mm_arena* arena) { return reinterpret_cast<memmgr::Arena*>(arena); }
memmgr::Places* Of(mm_places* places) { return reinterpret_cast<memmgr::Places*>(places); }
memmgr::Tier* Of(mm_tier* tier) { return reinterpret_cast<memmgr::Tier*>(tier); }
mm_tier* Handle(memmgr::Tier* tier) { return reinterpret_cast<mm_tier*>(tier); }

}  // namespace

extern "C" {

// ---- arena -----------------------------------------------------------------------------------------------------

mm_arena* mm_arena_create(uint64_t budget_bytes, uint64_t reserve_bytes, char* err, size_t err_len) {
  std::string wrong = "out of memory";
  auto* arena = Guarded<memmgr::Arena*>(
      nullptr, [&] { return memmgr::Arena::CreateOnHost(budget_bytes, reserve_bytes, &wrong); });
  if (arena == nullptr) Say(wrong, err, err_len);
  return reinterpret_cast<mm_arena*>(arena);
}

int mm_arena_destroy(mm_arena* arena) {
  if (arena == nullptr) return 0;
  if (Of(arena)->forked() || !Of(arena)->Idle()) return -1;
  delete Of(arena);
  return 0;
}

void mm_arena_set_reclaim(mm_arena* arena, mm_reclaim_fn reclaim, void* user) { Of(arena)->SetReclaim(reclaim, user); }
void mm_arena_set_budget(mm_arena* arena, uint64_t budget_bytes) { Of(arena)->SetBudget(budget_bytes); }
void mm_arena_add_outside(mm_arena* arena, int64_t delta) { Of(arena)->AddOutside(delta); }

void mm_arena_set_layout(mm_arena* arena, int remap) { Of(arena)->SetLayout(remap); }

void* mm_arena_alloc(mm_arena* arena, size_t bytes) {
  return Guarded<void*>(nullptr, [&] { return Of(arena)->Alloc(bytes); });
}

void* mm_arena_try_alloc(mm_arena* arena, size_t bytes, uint64_t keep_free) {
  return Guarded<void*>(nullptr, [&] { return Of(arena)->TryAlloc(bytes, keep_free); });
}

size_t mm_arena_block_bytes(mm_arena* arena, const void* p) { return Of(arena)->BlockBytes(p); }
size_t mm_arena_block(mm_arena* arena, const void* p, size_t* requested_bytes) {
  uint64_t requested = 0;
  const uint64_t bytes = Of(arena)->BlockBytes(p, &requested);
  *requested_bytes = requested;
  return bytes;
}
const void* mm_arena_base(mm_arena* arena) { return Of(arena)->Base(); }
int mm_arena_owns(mm_arena* arena, const void* p) { return Of(arena)->Owns(p) ? 1 : 0; }
size_t mm_arena_free(mm_arena* arena, void* p) { return Of(arena)->Free(p); }
uint64_t mm_arena_trim(mm_arena* arena, uint64_t keep_bytes) { return Of(arena)->Trim(keep_bytes); }
void mm_arena_stats_get(mm_arena* arena, mm_arena_stats* out) { Of(arena)->Stats(out); }
void mm_arena_reset_peak(mm_arena* arena) { Of(arena)->ResetPeak(); }
void mm_own_work(int delta) { memmgr::NoteOwnWork(delta); }
void mm_arena_note_virtual(mm_arena* arena, int64_t delta) { Of(arena)->NoteVirtual(delta); }
void mm_arena_reset_counts(mm_arena* arena) { Of(arena)->ResetCounts(); }
mm_places* mm_places_make(void) {
  return Guarded<mm_places*>(nullptr, [] { return reinterpret_cast<mm_places*>(new memmgr::Places); });
}
void mm_places_end(mm_arena* arena, mm_places* places) {
  Of(arena)->Forget(Of(places));
  delete Of(places);
}
void mm_places_stats_get(const mm_places* places, mm_places_stats* out) {
  *out = reinterpret_cast<const memmgr::Places*>(places)->stats();
}
void mm_arena_follow(mm_arena* arena, mm_places* places) {
  Guarded<int>(-1, [&] { return Of(arena)->Follow(Of(places)), 0; });
}
void mm_arena_at(mm_arena* arena, uint32_t position) { Of(arena)->At(position); }
void mm_arena_promise_outside(mm_arena* arena, int64_t delta) { Of(arena)->Promise(delta); }
uint64_t mm_arena_shortage(mm_arena* arena) { return Of(arena)->Shortage(0); }
uint64_t mm_arena_resident(mm_arena* arena) { return Of(arena)->resident(); }
uint64_t mm_arena_small_bytes(mm_arena* arena) { return Of(arena)->small_bytes(); }
uint64_t mm_arena_budget(mm_arena* arena) { return Of(arena)->budget(); }

void mm_arena_price(mm_arena* arena, const mm_price* prices, size_t n) { Of(arena)->SetPrices(prices, n); }
int mm_arena_disown(mm_arena* arena, const void* p, const void* owner) { return Of(arena)->Disown(p, owner) ? 1 : 0; }
void mm_arena_set_staleness_exponent(mm_arena* arena, double exponent) { Of(arena)->SetStalenessExponent(exponent); }

int64_t mm_arena_choose(mm_arena* arena, uint64_t need, uint64_t request, double now, mm_victim* out, size_t capacity) {
  return Guarded<int64_t>(-1, [&] { return Of(arena)->Choose(need, request, now, out, capacity); });
}

void mm_arena_walk(mm_arena* arena, mm_block_fn visit, void* user) {
  Guarded(0, [&] { return Of(arena)->Walk(visit, user), 0; });
}

int mm_arena_check(mm_arena* arena, char* err, size_t err_len) {
  const std::string wrong = Guarded<std::string>("", [&] { return Of(arena)->Check(); });
  Say(wrong, err, err_len);
  return wrong.empty() ? 0 : -1;
}

// ---- tiers -----------------------------------------------------------------------------------------------------

mm_tier* mm_tier_open(const char* folder, uint64_t capacity_bytes, uint64_t bytes_per_second, int workers, char* err,
                      size_t err_len) {
  return mm_tier_open_cached(folder, capacity_bytes, bytes_per_second, workers, 0, err, err_len);
}

mm_tier* mm_tier_open_cached(const char* folder, uint64_t capacity_bytes, uint64_t bytes_per_second, int workers,
                             uint64_t cached_bytes, char* err, size_t err_len) {
  std::string wrong = "out of memory";
  auto* tier = Guarded<memmgr::FileTier*>(nullptr, [&] {
    return memmgr::FileTier::Open(folder == nullptr ? "" : folder, capacity_bytes, bytes_per_second, workers, &wrong);
  });
  if (tier == nullptr) {
    Say(wrong, err, err_len);
  } else if (const int error = tier->Cache(cached_bytes); error != 0) {
    Say(std::string("cannot open the file a second time: ") + strerror(-error), err, err_len);
    tier->Close();
    return nullptr;
  }
  return Handle(tier);
}

mm_tier* mm_tier_open_host(mm_device* device, uint64_t capacity_bytes, char* err, size_t err_len) {
  std::string wrong = "out of memory";
  auto* tier = Guarded<memmgr::HostTier*>(nullptr, [&] {
    return memmgr::HostTier::Open(reinterpret_cast<memmgr::Device*>(device), capacity_bytes, &wrong);
  });
  if (tier == nullptr) Say(wrong, err, err_len);
  return Handle(tier);
}

mm_tier* mm_tier_open_ladder(mm_device* device, uint64_t host_bytes, const char* folder, uint64_t file_bytes,
                             uint64_t bytes_per_second, int workers, char* err, size_t err_len) {
  std::string wrong = "out of memory";
  auto* tier = Guarded<memmgr::LadderTier*>(nullptr, [&] {
    return memmgr::LadderTier::Open(reinterpret_cast<memmgr::Device*>(device), host_bytes, folder, file_bytes,
                                    bytes_per_second, workers, &wrong);
  });
  if (tier == nullptr) Say(wrong, err, err_len);
  return Handle(tier);
}

void mm_tier_close(mm_tier* tier) {
  if (tier != nullptr) Of(tier)->Close();
}

static mm_slot WriteTo(mm_tier* tier, const void* src, uint64_t bytes, memmgr::Urgency urgency) {
  const mm_slot slot = Guarded<mm_slot>(-ENOMEM, [&] { return Of(tier)->Write(src, bytes, urgency); });
  if (slot < 0) Of(tier)->Refused(src);
  return slot;
}

mm_slot mm_tier_write(mm_tier* tier, const void* src, uint64_t bytes) {
  return WriteTo(tier, src, bytes, memmgr::Urgency::kQueued);
}

mm_slot mm_tier_write_now(mm_tier* tier, const void* src, uint64_t bytes) {
  return WriteTo(tier, src, bytes, memmgr::Urgency::kNow);
}

mm_slot mm_tier_lend(mm_tier* tier, int fd, uint64_t offset, uint64_t bytes) {
  return Guarded<mm_slot>(-ENOMEM, [&] { return Of(tier)->Lend(fd, offset, bytes); });
}

int mm_tier_check_lent(mm_tier* tier, mm_slot slot) { return Of(tier)->CheckLent(slot); }

int mm_tier_read(mm_tier* tier, mm_slot slot, void* dst) {
  return Guarded(-ENOMEM, [&] { return Of(tier)->Read(slot, dst, memmgr::Urgency::kQueued); });
}

int mm_tier_read_now(mm_tier* tier, mm_slot slot, void* dst) {
  return Guarded(-ENOMEM, [&] { return Of(tier)->Read(slot, dst, memmgr::Urgency::kNow); });
}

int mm_tier_use(mm_tier* tier, mm_slot slot, mm_stream stream) { return Of(tier)->Use(slot, stream); }
const void* mm_tier_bytes(mm_tier* tier, mm_slot slot) { return Of(tier)->Bytes(slot); }
uint64_t mm_tier_ended(mm_tier* tier) { return Of(tier)->Ended(); }
int mm_tier_poll(mm_tier* tier, mm_slot slot) { return Of(tier)->Poll(slot); }
int mm_tier_known(mm_tier* tier, mm_slot slot) { return Of(tier)->Known(slot); }
int mm_tier_wait(mm_tier* tier, mm_slot slot) { return Of(tier)->Wait(slot); }
void mm_tier_free(mm_tier* tier, mm_slot slot) {
  Guarded(0, [&] { return Of(tier)->Free(slot), 0; });
}
void mm_tier_stats_get(mm_tier* tier, mm_tier_stats* out) { Of(tier)->Stats(out); }

void mm_tier_inject(mm_tier* tier, int write_errno, int after_writes, int read_errno, int after_reads) {
  Of(tier)->Inject(write_errno, after_writes, read_errno, after_reads);
}

uint64_t mm_bits_pack(const void* src, uint64_t bytes, mm_bits* out) { return memmgr::PackBits(src, bytes, out); }
void mm_bits_unpack(const mm_bits* from, void* dst, uint64_t bytes) { memmgr::UnpackBits(*from, dst, bytes); }
void mm_bits_free(mm_bits* from) { memmgr::FreeBits(from); }

}  // extern "C"
