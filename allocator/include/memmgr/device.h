// memmgr core, the part for accelerators: a device's memory in stream order, and the host tier below it. C ABI, no
// torch; every call of the driver goes through one table.
//
// Words used here (beside those of core.h):
//   stream      a queue of device work; work on one stream runs in order, streams run beside each other
//   tail        the end of the work that is queued on a stream now
//   mark        a numbered event in a stream; the clock is the number of the newest mark of all streams
//   to wait     a stream holds its later work until another one's tail, as it is now, has passed; the CPU goes on
//   home        the stream in whose order a block was allocated
//   touched     the streams whose queued work may still use a piece of memory: its home, and those it was handed to
//               (mm_device_used). Runs that are coalesced have the union
// The rule of all calls here: the new owner of memory waits for the last use of it by every stream that touched it, but
// its own. It waits for the stream's first mark after that use, or for its tail if there is none yet, so a wait can be
// longer than necessary, never shorter. No event is kept per block, and the CPU never waits in a free. In an allocation
// the CPU waits in two cases: pages have to be unmapped to be mapped elsewhere (never during a capture), or no event
// can be recorded for the work (a stream that its owner destroyed, graphs of a released pool).
//
// Threading: as in core.h. A call leaves the thread's context as it was.
#ifndef MEMMGR_DEVICE_H
#define MEMMGR_DEVICE_H
#include "memmgr/core.h"

#ifdef __cplusplus
extern "C" {
#endif
#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

// ---- the driver ------------------------------------------------------------------------------------------------

typedef void* mm_stream;  // CUstream, which is cudaStream_t; NULL is the default stream

// The entry points of the driver library that memmgr uses, looked up by name (libcuda's, or a double's with the same
// names). NULL with a text in err: no such library, or a function is missing. Loaded once per path; never unloaded.
typedef struct mm_driver mm_driver;
const mm_driver* mm_driver_load(const char* path, char* err, size_t err_len);  // path NULL: libcuda.so.1

// ---- a device's memory -----------------------------------------------------------------------------------------

typedef struct mm_device mm_device;

// How the arena's range gets its memory.
//   MM_MEMORY_MAPPED  addresses reserved once, pages mapped as the range grows and unmapped when they are given back
//   MM_MEMORY_PLAIN   one allocation of the whole budget (of the free memory, less a margin, when it is unlimited),
//                     whose length later budgets cannot pass: for drivers without virtual memory
enum { MM_MEMORY_MAPPED = 0, MM_MEMORY_PLAIN = 1 };
mm_device* mm_device_open(const mm_driver*, int ordinal, uint64_t budget_bytes, int memory, char* err, size_t err_len);
int mm_device_close(mm_device*);  // only when no block is live (else -1, and it stays); waits for the device

// Budget, prices, searches, statistics and walks are those of the arena. Blocks are not to be taken or freed there.
mm_arena* mm_device_arena(mm_device*);
int mm_device_ordinal(mm_device*);
int mm_device_memory(mm_device*, uint64_t* free_bytes, uint64_t* total_bytes);  // the driver's figures
// 0: the driver answers. Else its error, with its text in `why`. After a kernel's illegal access, for example, the
// context is of no use and every call fails; that looks like a lack of memory.
int mm_device_broken(mm_device*, char* why, size_t length);

// Kernels of another device may use this one's memory from now on, as far as the hardware lets them: 0 or the driver's
// error. Only for mapped memory (else -1): plain memory is opened by the runtime's own call.
int mm_device_allow(mm_device*, int peer_ordinal);

// As mm_arena_alloc and mm_arena_try_alloc, for work on `stream`. Waits, if any, are put on `stream` before the
// return. While `stream` is being captured into a graph there is no reclaim, no wait and no event: the memory is new,
// or only this stream has touched it; else NULL.
void* mm_device_alloc(mm_device*, size_t bytes, mm_stream stream);
void* mm_device_try_alloc(mm_device*, size_t bytes, uint64_t keep_free, mm_stream stream);
void mm_device_free(mm_device*, void* p);             // in stream order; never waits
void mm_device_used(mm_device*, void* p, mm_stream);  // work on this stream uses the block, now or up to its end
// A mark at the tail of a stream of the program: copies of memory used before it need not wait for later work. Does
// nothing during a capture. Called every few ops.
void mm_device_mark(mm_device*, mm_stream);
// The clock, to be read with an atomic load after work was queued: that work is over when a mark of its stream with a
// greater number has passed.
const uint64_t* mm_device_clock(void);
// The program's last use of the live block was queued before the clock said `time`; an mm_tier_use is one, too. Holds
// for the next mm_tier_write of it, refused or not, which then does not wait for later work; without it that waits for
// the tails of the streams.
void mm_device_note_use(mm_device*, const void* p, uint64_t time);
// While it is on, blocks that the calling thread allocates do not make their stream wait for former users of the
// memory: the first mm_tier_read into them does. No other work may use such a block before. Returns the old value.
int mm_device_defer_waits(int on);
mm_stream mm_device_home(mm_device*, const void* p);  // of the live block that begins at p; NULL also for none
// Work put on `waiter` from now on comes after the tail of `other` (as it is now), or of all streams that touched the
// block. 0 or the driver's error.
int mm_device_wait(mm_device*, mm_stream waiter, mm_stream other);
int mm_device_wait_block(mm_device*, mm_stream waiter, const void* p);
int mm_device_is_capturing(mm_device*, mm_stream);         // into a graph: 1, 0, or -1 where the driver does not say
int mm_device_synchronize(mm_device*);                     // the CPU waits for all streams; nothing is touched then
uint64_t mm_device_trim(mm_device*, uint64_t keep_bytes);  // as mm_arena_trim; waits for the streams that touched it

// Memory of this device that another allocator has and hands on in order of one stream. From mm_device_lend on the
// arena counts such a block as outside, and it is a live block to mm_device_used, _home, _wait_block and to tiers. When
// it ends its home waits for the other streams that touched it: the next owner of the memory need not wait. Not for
// blocks of the arena. An address that is lent again was freed without a call of mm_device_lent_ends.
void mm_device_lend(mm_device*, const void* p, uint64_t bytes, mm_stream home);
void mm_device_lent_ends(mm_device*, const void* p);  // unknown: nothing happens
void mm_device_forget_lent(mm_device*);               // all of them, without a wait

// Copies in order of `stream`; 0 or the driver's error. fetch returns when the bytes are there.
int mm_device_copy(mm_device*, void* to, const void* from, size_t bytes, mm_stream stream);
int mm_device_fetch(mm_device*, void* to_host, const void* from, size_t bytes, mm_stream stream);

// The device looks at bytes, or fills them, with kernels of its own in order of `stream`. 0 or a negative errno:
// -ENOSYS where there are none (the driver has no modules, or refuses ours), -EBUSY while the stream is being captured:
// nothing is queued then. Any address and length of this device. The answer of mm_device_has_kernels never changes.
//   delay      the stream does nothing for so long, or for some times as long: the device's clock is not known
//   compare, sum  return when the stream has reached the result
//   compare    the results of two runs of an op, in words of 4 bytes; the second one was made in memory full of the
//   byte
//              `fill` (below 0: it was not filled). `found`: the bits of mm_compared
//   sum        depends on the bytes alone; not the sum of any function for the host
//   sum_begin  only queues; `block` is the start of a live block, which may be freed at once and counts as touched by
//              the stream. Each sum is ended, which waits, or dropped, before the device is closed
int mm_device_has_kernels(mm_device*);
int mm_device_fill(mm_device*, void* p, int byte, size_t bytes, mm_stream stream);
int mm_device_delay(mm_device*, uint64_t nanoseconds, mm_stream stream);
typedef enum {
  MM_DIFFERS = 1,  // a word of the second result is another one
  MM_GAPS = 2,     // a word of the second result is the fill: the op may not have written it
  MM_OTHER = 4,    // a word differs, and is not the fill
  MM_WRITTEN = 8,  // a word is not the fill
} mm_compared;
int mm_device_compare(mm_device*, const void* first, const void* second, size_t bytes, int fill, mm_stream stream,
                      unsigned* found);
int mm_device_sum(mm_device*, const void* p, size_t bytes, mm_stream stream, uint64_t* sum);
typedef struct mm_sum mm_sum;
int mm_device_sum_begin(mm_device*, const void* block, size_t bytes, mm_stream stream, mm_sum** sum);
int mm_device_sum_is_there(mm_device*, mm_sum*);  // sum_end would not wait
int mm_device_sum_end(mm_device*, mm_sum*, uint64_t* value);
void mm_device_sum_drop(mm_device*, mm_sum*);
// The CPU waits for the queued work of this stream; -EBUSY while it is being captured.
int mm_device_synchronize_stream(mm_device*, mm_stream stream);

// Graphs. Between begin and end, allocations (of all threads: torch's filter is not used) come from the pool, and
// memory freed there is reused only there, until the pool was released as often as it was begun and its blocks are
// free.
int mm_device_begin_pool(mm_device*, uint64_t pool_a, uint64_t pool_b);
int mm_device_end_pool(mm_device*, uint64_t pool_a, uint64_t pool_b);
int mm_device_release_pool(mm_device*, uint64_t pool_a, uint64_t pool_b);

typedef struct {
  uint64_t waits;             // of a stream for another one's tail
  uint64_t cross_reuses;      // blocks that needed at least one
  uint64_t synchronizations;  // the CPU waited (trim, unmapping, closing)
  uint64_t maps;              // calls that made memory, and gave it back
  uint64_t unmaps;
  uint64_t map_nanoseconds;
  uint64_t unmap_nanoseconds;
  uint64_t streams;  // seen so far
  uint64_t pools;    // alive
  uint64_t driver_errors;
} mm_device_stats;
void mm_device_stats_get(mm_device*, mm_device_stats* out);

// ---- how long the device works on something ----------------------------------------------------------------------

// Points in streams, from whichever threads; a point costs the host about a microsecond. `add` says its number, or -1
// where there is none (a capture, an error, too many). `between` gives seconds, and the CPU waits for the second point;
// negative: not known. The device has to outlive them.
typedef struct mm_points mm_points;
mm_points* mm_points_begin(mm_device*);
int mm_points_add(mm_points*, mm_stream);
double mm_points_between(mm_points*, int first, int second);
void mm_points_end(mm_points*);

// ---- the host tier ---------------------------------------------------------------------------------------------

// Page-locked memory of at most `capacity_bytes`, copies on two side streams. It is locked in pieces ahead of need, by
// a thread of its own, never much more than is used. A piece that cannot be locked ends the growth: capacity_bytes of
// the statistics is then the locked size. A tier like the one of core.h, with these differences:
//   write, write_now  the source is the start of a live block of the device. Both only queue: the copy runs behind
//                     every stream that touched the block, the block counts as touched by the copy, so it may be freed
//                     at once. No stream may write to it until then without mm_tier_use. They wait where a piece
//                     has to be locked first
//   read              the target is the start of a live block; the copy runs behind its home's tail and the slot's
//                     write. Each user of the block first calls mm_tier_use
//   read_now          read, and the block's home waits for it
//   poll              tells if the copy is done; a block may be freed and a slot given back before
//   wait              the CPU waits
//   free              never waits: the next owner of the room waits in stream order
mm_tier* mm_tier_open_host(mm_device*, uint64_t capacity_bytes, char* err, size_t err_len);
// The same with a file below it, as of mm_tier_open: page-locked memory stays at `host_bytes`, and the bytes that have
// been there longest move to the file. write_now and read_now wait for the disk where they need room or bytes of it;
// mm_tier_bytes returns no bytes of the file. Injected errors are the file's.
mm_tier* mm_tier_open_ladder(mm_device*, uint64_t host_bytes, const char* folder, uint64_t file_bytes,
                             uint64_t bytes_per_second, int workers, char* err, size_t err_len);
// Work put on `stream` from now on comes after the last operation of this slot: a read; before the first one the write
// (so that the block that was written out may be overwritten). A file: the calling thread waits.
int mm_tier_use(mm_tier*, mm_slot, mm_stream stream);
// The slot's bytes in host memory, complete (the CPU waits), valid until the slot is freed. NULL: a file, or an error.
const void* mm_tier_bytes(mm_tier*, mm_slot);

// ---- for tests -------------------------------------------------------------------------------------------------

// Builds with MEMMGR_MUTATIONS leave out the wait of this name ("" or NULL: none). Names: mm_test_wait_names, one line
// each. Other builds have no such wait to leave out, and return -1.
int mm_test_leave_out(const char* wait);
const char* mm_test_wait_names(void);
// How page-locked memory of tiers that are opened from now on grows: its first piece, the later ones (0: as usual), and
// whether memory is touched before it is locked (a double of the driver needs no pages). In all builds.
int mm_test_lock_pieces(uint64_t first_bytes, uint64_t piece_bytes, int touch);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif
#endif
