// Pool: the source of one device's managed memory. Its malloc keeps the budget: it calls reclaim() before it would pass
// it. A session has one pool at a time (Session::pool). Blocks of an earlier one go back to that one.
//
// On an accelerator work is queued: resident bytes are valid for work that is queued after them. The pager's rules for
// that have names (stream_rules.h), and tests leave one out to see bits change.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <string>

#include "base/checksum.h"
#include "base/session.h"
#include "memmgr/device.h"
#include "memmgr/plugin.h"
#include "pools/compared.h"

namespace memmgr::pager {

class Pool {
 public:
  virtual ~Pool() = default;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  const c10::Device device;
  mm_arena* const arena;
  // Its budgets open over this pool. One is open over it while `session.open` is true and `session.pool` is this pool.
  Session& session;
  bool on_host() const { return device.is_cpu(); }

  // The deleter that marks a DataPtr as the pool's.
  virtual c10::DeleterFnPtr deleter() const = 0;
  // The deleter of blocks that torch's own allocator gave before the pool's was in place, or null. The arena counts its
  // memory as outside. No cell is made of such a block, but its bytes can be moved (cells/adoption.h).
  virtual c10::DeleterFnPtr earlier() const { return nullptr; }
  // Returns true if the arena counts this memory.
  bool counts(const at::DataPtr& p) const { return owns(p.get()) || (earlier() && p.get_deleter() == earlier()); }
  // The allocator that storages of this memory keep.
  virtual c10::Allocator* allocator() const = 0;
  // Allocates on the calling thread's stream. Throws c10::OutOfMemoryError when nothing more can be evicted.
  virtual at::DataPtr allocate(uint64_t nbytes) = 0;
  // Never reclaims, and leaves `keep_free` bytes of the budget. Empty: no room.
  virtual at::DataPtr try_allocate(uint64_t nbytes, uint64_t keep_free) = 0;

  // Copies in order of the calling thread's stream.
  virtual void copy(void* to, const void* from, uint64_t nbytes) = 0;
  // These wait for all work on the bytes that the program has queued.
  virtual void compare(const void* first, const void* second, uint64_t nbytes, int fill, Compared* found) = 0;
  virtual uint64_t sum(const void* p, uint64_t nbytes) = 0;
  virtual void scribble(void* p, uint64_t nbytes) = 0;  // overwrites the bytes; in torture mode
  virtual void settle() {}                              // waits until all queued work has run
  virtual void settle_stream() {}                       // waits until the work of the calling thread's stream has run
  // Begins a checksum of the bytes as they are at this point of the calling thread's stream. It may only be queued, and
  // the block may be freed at once. Not `taken`: it cannot be queued, during a capture.
  virtual Checksum begin_sum(const void* p, uint64_t nbytes) { return Checksum(sum(p, nbytes)); }
  virtual bool sums_cheaply(uint64_t /*nbytes*/) const { return true; }
  virtual bool fills() const { return true; }        // memory that is taken is filled where `Filling` asks for it
  virtual bool sums_later() const { return false; }  // begin_sum does not wait

  // Opens a tier in page-locked memory of so many bytes; with a folder also in a file there, below the memory.
  virtual mm_tier* open_host_tier(uint64_t, const char*, uint64_t, uint64_t, char*, size_t) { return nullptr; }
  virtual bool owns(const void* p) const { return mm_arena_owns(arena, p); }  // a block of its memory, in use
  virtual bool has_addresses() const { return true; }  // its blocks have addresses that can be searched
  virtual void trim() {}                               // gives memory beyond the budget back to the device
  virtual void set_budget(uint64_t bytes) { mm_arena_set_budget(arena, bytes); }
  virtual void install() = 0;
  virtual void uninstall() = 0;
  virtual void forget_in_child() = 0;
  virtual const char* out_of_memory_words() const = 0;
  // Returns the reason why the device fails every call; empty: it works. With a reason, an error is not about memory.
  virtual std::string broken() const { return {}; }
  void throw_if_broken() const;
  // The device whose streams order the work on the pool's blocks; null: none is queued.
  virtual mm_device* queue() const { return nullptr; }
  virtual mm_stream stream() const { return nullptr; }           // the calling thread's
  virtual mm_stream opened_on() const { return nullptr; }        // current when the budget was opened
  virtual mm_stream home(const void*) const { return nullptr; }  // the stream on which a block was allocated

 protected:
  Pool(Session& of, c10::Device where, mm_arena* from) : device(where), arena(from), session(of) {}
};

// While it lives, memory that this thread takes is memmgr's own: without a budget no op would need it.
struct OwnWork {
  OwnWork() { mm_own_work(1); }
  ~OwnWork() { mm_own_work(-1); }
  OwnWork(const OwnWork&) = delete;
};

// Called by a pool when a request finds no room. The layer that evicts sets it before the first budget.
struct RoomMaker {
  // Called inside malloc (rule 11): runs no op, takes no GIL. Returns the bytes released.
  uint64_t (*reclaim)(void* pool, uint64_t need, uint64_t request, int attempt) = nullptr;
  __attribute__((noreturn)) void (*fail)(Pool& pool, uint64_t request) = nullptr;  // throws c10::OutOfMemoryError
};
extern RoomMaker room_maker;

}  // namespace memmgr::pager
