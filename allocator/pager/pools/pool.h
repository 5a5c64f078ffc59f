// Pool: where the managed memory of one device comes from. It keeps the budget in its malloc and asks reclaim() before
// it would pass it. One is open at a time (Budget::pool); what an earlier one gave goes back to it all the same.
//
// On an accelerator work is queued: bytes that "are there" are there for whoever queues behind them. The pager's rules
// for that have a name here, and tests leave one out to see bits change.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <string>

#include "base/checksum.h"
#include "memmgr/device.h"
#include "memmgr/plugin.h"

namespace memmgr::pager {

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

// What this thread takes meanwhile is memmgr's own: without a budget nobody would need it.
struct OwnWork {
  OwnWork() { mm_own_work(1); }
  ~OwnWork() { mm_own_work(-1); }
  OwnWork(const OwnWork&) = delete;
};

// What a pool calls when a request finds no room. The layer that evicts sets it before the first budget.
struct RoomMaker {
  // From inside malloc (rule 11): no op, no GIL. Returns the bytes that were released.
  uint64_t (*reclaim)(void* pool, uint64_t need, uint64_t request, int attempt) = nullptr;
  __attribute__((noreturn)) void (*fail)(uint64_t request) = nullptr;  // throws c10::OutOfMemoryError
};
extern RoomMaker room_maker;

}  // namespace memmgr::pager
