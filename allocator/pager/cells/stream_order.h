// Cells whose bytes are used in stream order.
#pragma once

#include "cells/types.h"
#include "pools/pool.h"
#include "pools/stream_rules.h"

namespace memmgr::pager {

// More than one stream has been used since the budget opened.
extern std::atomic<bool> several_streams;

// Records the stream on which the block of the cell's new bytes was allocated. The caller has the cell busy.
void note_queued_home(Cell* c);
inline void note_home(Cell* c) {
  if (C10_UNLIKELY(!c->pool->on_host())) note_queued_home(c);
}

// Called before a copy of the bytes to the tier is queued: it need not wait for work that was queued after their last
// use. The caller has the cell busy.
void tell_last_use(const Cell* c);
inline void note_last_use(const Cell* c) {
  if (C10_UNLIKELY(!c->pool->on_host())) tell_last_use(c);
}

// Work that this thread has queued since its stream's last mark.
struct Unmarked {
  uint64_t bytes = 0;
  uint32_t ops = 0;
  // An H100 reads or writes 64 MiB in 24 us and copies them over its link in 1.2 ms: a copy that waits for a mark
  // begins that much later at most. The mark costs the host 0.2 us and the time of the calls around it.
  bool due() const { return bytes >= (uint64_t{64} << 20) || ops >= 32; }
};
Unmarked& unmarked();
void mark_stream(const Session& session);
inline void note_queued(uint64_t bytes) {
  unmarked().bytes += bytes;
  ++unmarked().ops;
}

// While it lives, a block that this thread takes makes no stream wait: a read of the tier fills the block, and the read
// itself waits for the block's former users.
struct FilledByTier {
  FilledByTier() : before_(mm_device_defer_waits(1)) {}
  ~FilledByTier() { mm_device_defer_waits(before_); }
  FilledByTier(const FilledByTier&) = delete;
  FilledByTier& operator=(const FilledByTier&) = delete;

 private:
  const int before_;
};

void use_queued(Cell* c);
// Orders the work that this thread queues from now on after the restore of the bytes. The caller has a pin, and the
// cell is resident.
inline void use_here(Cell* c) {
  if (C10_UNLIKELY(queues)) use_queued(c);
}

}  // namespace memmgr::pager
