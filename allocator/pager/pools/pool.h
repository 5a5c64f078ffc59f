// Pool: where the managed memory of one device comes from. It keeps the budget in its malloc and asks reclaim() before
// it would pass it. One is open at a time (Budget::pool); what an earlier one gave goes back to it all the same.
//
// On an accelerator work is queued: bytes that "are there" are there for whoever queues behind them. The pager's rules
// for that have a name here, and tests leave one out to see bits change.
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "base/checksum.h"
#include "memmgr/device.h"
#include "memmgr/plugin.h"

namespace memmgr::pager {

enum StreamRule : uint32_t {
  kRuleUses = 1,        // what another stream than its home uses is told to the allocator
  kRuleFilled = 2,      // who uses bytes that came back on another stream waits for that one
  kRulePrefetched = 4,  // bytes that were read ahead are used behind their read
  kRuleChecked = 8,     // a checksum is taken behind whoever wrote
  kRuleClosed = 16,     // when the budget has ended nobody has to wait any more
  kRuleLate = 128,      // who may be behind an event of a step waits for its slices that ran after that
  kRuleWhere = 256,     // a slice is queued where its step would have been
  kScribbled = 64,      // no rule: in torture what has left is overwritten, behind all that used it
  kSampled = 32,  // no rule: a sample of what leaves has a checksum; what comes back with one waits for the device
};

class Pool {
 public:
  virtual ~Pool() = default;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  const c10::Device device;
  mm_arena* const arena;
  bool on_host() const { return device.is_cpu(); }

  // What marks a DataPtr as the pool's.
  virtual c10::DeleterFnPtr deleter() const = 0;
  // The one that storages of this memory remember.
  virtual c10::Allocator* allocator() const = 0;
  // On the calling thread's stream. Throws c10::OutOfMemoryError when nothing more can be let go.
  virtual at::DataPtr allocate(uint64_t nbytes) = 0;
  // Never reclaims, leaves `keep_free` bytes of the budget; empty: no room.
  virtual at::DataPtr try_allocate(uint64_t nbytes, uint64_t keep_free) = 0;

  // In order of the calling thread's stream.
  virtual void copy(void* to, const void* from, uint64_t nbytes) = 0;
  // These wait until the bytes are what the program has queued.
  virtual bool same(const void* a, const void* b, uint64_t nbytes) = 0;
  virtual uint64_t sum(const void* p, uint64_t nbytes) = 0;
  virtual void scribble(void* p, uint64_t nbytes) = 0;  // other bytes; in torture
  virtual void settle() {}                              // all that was queued has run
  virtual void settle_stream() {}                       // what the calling thread's stream was given has run
  // The sum of the bytes as they are at this place of the calling thread's stream. It may only be queued; the block may
  // be given back at once. None (not `taken`) where it cannot be queued, during a capture.
  virtual Checksum begin_sum(const void* p, uint64_t nbytes) { return Checksum(sum(p, nbytes)); }
  virtual bool sums_cheaply(uint64_t /*nbytes*/) const { return true; }

  // Page-locked memory of so many bytes; with a folder also a file there, below it.
  virtual mm_tier* open_host_tier(uint64_t, const char*, uint64_t, uint64_t, char*, size_t) { return nullptr; }
  virtual bool owns(const void* p) const { return mm_arena_owns(arena, p); }  // a block of its memory, in use
  virtual bool places() const { return true; }                                // it knows where blocks lie
  virtual void trim() {}  // what was let go beyond the budget is the device's again
  virtual void set_budget(uint64_t bytes) { mm_arena_set_budget(arena, bytes); }
  virtual void install() = 0;
  virtual void uninstall() = 0;
  virtual void forget_in_child() = 0;
  virtual const char* out_of_memory_words() const = 0;
  // Why the device answers nothing any more, or nothing: then memory is not what is missing.
  virtual std::string broken() const { return {}; }
  virtual mm_device* queue() const { return nullptr; }
  virtual mm_stream stream() const { return nullptr; }           // that the calling thread queues on there
  virtual mm_stream opened_on() const { return nullptr; }        // current when the budget was opened
  virtual mm_stream home(const void*) const { return nullptr; }  // in whose order a block was allocated

 protected:
  Pool(c10::Device where, mm_arena* from) : device(where), arena(from) {}
};

// How this thread's op takes memory, and what it has taken since `begin_scratch`.
struct Taking {
  int side = MM_SIDE_LOW;    // where large blocks lie, where sides differ
  int fill = -1;             // what fills memory of the host's pool; not below 0
  int64_t scratch = 0;       // bytes taken and not given back
  int64_t scratch_peak = 0;  // their high-water mark
  void begin_scratch() { scratch = scratch_peak = 0; }
  void take(uint64_t nbytes) {
    scratch += static_cast<int64_t>(nbytes);
    if (scratch > scratch_peak) scratch_peak = scratch;
  }
};
Taking& taking();  // keep it: to find this thread's costs more than to use it

// What this thread takes meanwhile is memmgr's own: without a budget nobody would need it.
struct OwnWork {
  OwnWork() { mm_own_work(1); }
  ~OwnWork() { mm_own_work(-1); }
  OwnWork(const OwnWork&) = delete;
};

// Fills memory that this thread takes from the host's pool, meanwhile.
struct Filling {
  explicit Filling(int byte) : before(taking().fill) { taking().fill = byte; }
  ~Filling() { taking().fill = before; }
  Filling(const Filling&) = delete;
  const int before;
};

Pool* cpu_pool();
// driver: a library with the driver's entry points, null for CUDA's. Throws where the memory cannot be had.
Pool* device_pool(c10::Device where, const char* driver);
// CUDA's allocator is ours, or torch's own behind our door, and this is its table.
void use_plugin(const mm_plugin* plugin);

// ---- what a device queues ----

// The open budget's device queues its work.
extern std::atomic<bool> queues;
bool rule_holds(StreamRule rule);
void leave_out(uint32_t rules);

void begin_scratch();
void note_scratch_taken(uint64_t nbytes);
void note_scratch_given(uint64_t nbytes);
uint64_t scratch_now();  // of it, what is there still
uint64_t scratch_peak();
// Cells that leave meanwhile, from inside of an op's malloc, are not what the op gives back.
struct ScratchStays {
  ScratchStays();
  ScratchStays(const ScratchStays&) = delete;
  ScratchStays& operator=(const ScratchStays&) = delete;
  ~ScratchStays();
  const int64_t before;
};

}  // namespace memmgr::pager
