// memmgr core: the torch-free half of the allocator, behind a C ABI.
//
// Words used here:
//   arena      one address range that hands out blocks; all blocks are ordered by address
//   block      a contiguous piece of the arena, live or free; free neighbours are coalesced at once
//   budget     bytes that may be live at any time: live_bytes + outside_bytes <= budget_bytes
//   outside    bytes that count against the budget but were allocated elsewhere (before the arena was in place)
//   committed  pages of the range that are backed by memory; never more than the budget plus one page per fragment
//   reclaim    the callback that frees blocks when a request would pass the budget or finds no run that fits
//   remap      answering a request that has its bytes but no run of them by taking addresses further up, and giving as
//              many pages back elsewhere
//   price      the cost of making a block free; a block without one is pinned
//   tier       a place below the device where bytes can be parked: here one unlinked file, in device.h host memory
//
// Threading: every function may be called from any thread, with or without the GIL. No lock of the core is held while
// the reclaim callback runs, and the callback may call mm_free (that is its purpose).
#ifndef MEMMGR_CORE_H
#define MEMMGR_CORE_H
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// The library hides every symbol but these.
#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

#define MM_UNLIMITED UINT64_MAX
#define MM_UNIT 512  // bytes; blocks of more than 8 KiB are multiples of it

// ---- arena -----------------------------------------------------------------------------------------------------

typedef struct mm_arena mm_arena;

// Frees something. `need` is how many more bytes must become free for the request of `request` bytes to stay within
// the budget (0: enough bytes are free, but no run of addresses is long enough). `attempt` counts from 0 within one
// allocation. Returns the bytes that it released (an estimate is fine), 0 when it has nothing left to give. It is asked
// again until the request fits, it returns 0, or many rounds in a row gained nothing. An allocation from inside the
// callback does not call it again. It is not called for a request that is larger than the whole budget.
typedef uint64_t (*mm_reclaim_fn)(void* user, uint64_t need, uint64_t request, int attempt);

typedef struct {
  uint64_t budget_bytes;
  uint64_t outside_bytes;
  uint64_t live_bytes;           // sum of the sizes of live blocks (sizes after alignment)
  uint64_t live_peak_bytes;      // high-water mark of live_bytes since the last mm_arena_reset_peak
  uint64_t resident_peak_bytes;  // high-water mark of live_bytes + outside_bytes, likewise
  uint64_t requested_bytes;      // sum of requested sizes of live blocks
  uint64_t committed_bytes;      // pages backed by memory
  uint64_t committed_peak_bytes;
  uint64_t live_blocks;
  uint64_t free_bytes;          // committed free blocks
  uint64_t largest_free_bytes;  // largest run of free committed bytes
  uint64_t allocations;         // since creation
  uint64_t frees;
  uint64_t reclaims;              // calls of the callback
  uint64_t reclaims_contiguity;   // of these, made although the free bytes sufficed
  uint64_t reclaim_nanoseconds;   // inside the callback
  uint64_t failures;              // requests of mm_arena_alloc that ended in NULL
  uint64_t small_blocks;          // live blocks in the small-block area
  uint64_t unmanaged_peak_bytes;  // see mm_arena_note_virtual
  uint64_t remapped_bytes;        // pages given back elsewhere so that a block could have new ones
  // Searches (mm_arena_choose), and their results. An episode is one request that had to reclaim.
  uint64_t searches;
  uint64_t search_nanoseconds;
  uint64_t search_max_nanoseconds;
  uint64_t episodes;
  uint64_t episodes_contiguity;   // of these, with bytes enough from the start
  uint64_t evicted_bytes;         // bytes released by the callback's own count, over all episodes
  uint64_t evicted_beyond_bytes;  // of these, more than the request was short of
  uint64_t evicted_excess_bytes;  // of these, more than the whole request: bytes that no run of its length can explain
  uint64_t longest_run_bytes;     // now: the longest run of addresses that a request can have without remap
  uint64_t placeable_bytes;       // now: all bytes that could still be handed out
  double free_share_sum;  // at each episode's start: free bytes / budget (Coop's rate); sum over episodes, worst
  double free_share_max;
  double fragmentation_sum;  // likewise 1 - longest run / free bytes; 0 where remap can make any run
  double fragmentation_max;
} mm_arena_stats;

// Reserves an address range (no memory yet): reserve_bytes for large blocks and an eighth of it for small ones.
// budget_bytes may be MM_UNLIMITED. reserve_bytes 0 picks a default that is generous for this machine. Returns NULL
// with a text in err.
mm_arena* mm_arena_create(uint64_t budget_bytes, uint64_t reserve_bytes, char* err, size_t err_len);
// Only when no block is live; returns 0, or -1 and leaves the arena as it was.
int mm_arena_destroy(mm_arena*);

void mm_arena_set_reclaim(mm_arena*, mm_reclaim_fn, void* user);
void mm_arena_set_budget(mm_arena*, uint64_t budget_bytes);  // a smaller budget binds from the next allocation on
void mm_arena_add_outside(mm_arena*, int64_t delta);
// Keeps room for bytes that will be counted as outside: no allocation gets it until the promise is taken back.
void mm_arena_promise_outside(mm_arena*, int64_t delta);

// Where large blocks may lie (from the next allocation on).
//   remap   MM_REMAP_FIRST: anywhere in the range; a request that finds no run goes further up (the default)
//           MM_REMAP_LAST:  only within the budget's length of addresses; further up when reclaim has nothing to give
//           MM_REMAP_NEVER: only there: how an arena behaves that owns its memory as one piece
enum { MM_REMAP_FIRST = 0, MM_REMAP_LAST = 1, MM_REMAP_NEVER = 2 };
void mm_arena_set_layout(mm_arena*, int remap);

// Places (places.h): memory for the blocks of periods that ask for the same blocks in the same order. It is arranged
// once two such periods in a row were followed, and anew where many blocks do not get theirs. `follow` begins a period;
// NULL ends one. A period goes on until the next call; mm_arena_at says where the program is in it. While places are
// followed a request that has its bytes but no run goes further up, as with MM_REMAP_FIRST. Nothing happens where pages
// are moved cheaply (the host) or not at all.
typedef struct mm_places mm_places;
typedef struct {
  uint64_t rows;             // requests of a period that have a site
  uint64_t frames;           // pages of memory that these share
  uint64_t computations;     // how often they were computed
  uint64_t asked_bytes;      // by requests of a page or more in the last whole period
  uint64_t displaced_bytes;  // of these, that are at no site
  uint64_t lacking_periods;  // in a row, in which the budget had no memory for a site
  uint64_t lacking_bytes;    // the most that were missing at a time in the last period
} mm_places_stats;
mm_places* mm_places_make(void);
void mm_places_end(mm_arena*, mm_places*);  // of the arena that has followed them
void mm_places_stats_get(const mm_places*, mm_places_stats* out);
void mm_arena_follow(mm_arena*, mm_places*);
void mm_arena_at(mm_arena*, uint32_t position);

// Alignment is 64 up to the small-block limit, 512 above. Size 0 returns NULL. NULL: out of budget after reclaim gave
// up.
void* mm_arena_alloc(mm_arena*, size_t bytes);
// Never calls reclaim and leaves at least `keep_free` bytes of the budget free: for prefetch.
void* mm_arena_try_alloc(mm_arena*, size_t bytes, uint64_t keep_free);
// The block's size after alignment, 0 when p is not the start of a live block.
size_t mm_arena_block_bytes(mm_arena*, const void* p);
// Returns the same, and the bytes of the request in *requested_bytes (0 as well).
size_t mm_arena_block(mm_arena*, const void* p, size_t* requested_bytes);
const void* mm_arena_base(mm_arena*);         // the address that a walk counts from
int mm_arena_owns(mm_arena*, const void* p);  // any address in the range; takes no lock
// NULL is ignored; anything else that is not a live block of this arena ends the process, as free() would. Returns the
// block's size.
size_t mm_arena_free(mm_arena*, void* p);
// ---- prices and searches: victims that make room for a request (window.h) ----

// cost >= 0: the block may leave at cost / staleness^exponent, staleness being `now` of the search minus last_access;
// owner is handed back by the search. cost < 0 (or not finite): pinned. owner NULL: pinned and forgotten. A pointer
// that is no live block is skipped. Freeing a block forgets its price.
typedef struct {
  const void* p;
  void* owner;
  double cost;
  double last_access;
} mm_price;
void mm_arena_price(mm_arena*, const mm_price* prices, size_t n);
// Forgets the block's price if its owner is `owner`. Returns 1 if so.
int mm_arena_disown(mm_arena*, const void* p, const void* owner);
void mm_arena_set_staleness_exponent(mm_arena*, double exponent);

typedef struct {
  void* p;
  void* owner;
  uint64_t bytes;
} mm_victim;
// The victims for a request of `request` bytes (after alignment) that is short of `need`, as reclaim gets them. Returns
// how many, the first `capacity` of them in `out`; -1 when no choice reaches the goal. Releases no block: the caller
// checks that the victims may be evicted, pins the others, and calls again. Where remap comes first, and for small
// blocks, only `need` counts.
int64_t mm_arena_choose(mm_arena*, uint64_t need, uint64_t request, double now, mm_victim* out, size_t capacity);

// Gives pages of free blocks back to the system; keep_bytes stay for reuse. Returns the bytes given back.
uint64_t mm_arena_trim(mm_arena*, uint64_t keep_bytes);

void mm_arena_stats_get(mm_arena*, mm_arena_stats* out);
void mm_arena_reset_peak(mm_arena*);
void mm_arena_reset_counts(mm_arena*);  // of reclaims, searches and their results
// Bytes that are evicted or offloaded at this moment but would be live without memmgr: lets the arena keep the
// high-water mark of the unmanaged run (live + outside + virtual). delta may be negative.
void mm_arena_note_virtual(mm_arena*, int64_t delta);
// While the sum of a thread's calls is above zero, its allocations would not exist without memmgr and raise no such
// mark.
void mm_own_work(int delta);
uint64_t mm_arena_resident(mm_arena*);  // live + outside, one atomic read
// Bytes of live blocks of MM_SMALL_FROM to below MM_SMALL_TO bytes: storages of that size are too small to be paged one
// by one, and may be many. One atomic read.
#define MM_SMALL_FROM 4096
#define MM_SMALL_TO 65536
uint64_t mm_arena_small_bytes(mm_arena*);
uint64_t mm_arena_shortage(mm_arena*);  // bytes by which these and promised bytes exceed the budget
uint64_t mm_arena_budget(mm_arena*);

// Walks the blocks in address order (for the dashboard, tests and the window), on a copy made at the call: visit may
// call anything, and stops the walk by returning something else than 0. state: 0 free, 1 live, 2 free and not
// committed.
typedef int (*mm_block_fn)(void* user, uint64_t offset, uint64_t bytes, int state);
void mm_arena_walk(mm_arena*, mm_block_fn, void* user);
// 0 when every invariant holds, else -1 with a text. Debug builds (MEMMGR_DEBUG=1 in the environment) run it after
// every event.
int mm_arena_check(mm_arena*, char* err, size_t err_len);

// ---- bits ------------------------------------------------------------------------------------------------------

// Bytes whose elements take two values only, as a bit each.
typedef struct {
  void* bits;     // malloc's
  uint32_t item;  // bytes of an element: 1, 2, 4 or 8
  uint64_t values[2];
} mm_bits;
// Bytes that the bits take; 0 if there are more than two values for every size of element, or no memory. `src` does not
// change meanwhile.
uint64_t mm_bits_pack(const void* src, uint64_t bytes, mm_bits* out);
void mm_bits_unpack(const mm_bits*, void* dst, uint64_t bytes);  // as many bytes as were packed: the same
void mm_bits_free(mm_bits*);

// ---- file tier -------------------------------------------------------------------------------------------------

// In a forked child mm_tier_read_now reads bytes written before the fork (-ESTALE: the parent has needed the room, or
// the child has closed descriptors that it did not open); every other call returns -ECANCELED or does nothing, and
// close does not wait. Room that a living child may read is used again only when there is no other.
typedef struct mm_tier mm_tier;
typedef int64_t mm_slot;  // >= 0, or a negative errno

typedef struct {
  uint64_t capacity_bytes;  // of page-locked memory (device.h) less, once no more of it can be had
  uint64_t used_bytes;      // slots that are held
  uint64_t used_peak_bytes;
  uint64_t file_bytes;
  uint64_t written_bytes;  // payload, since open
  uint64_t read_bytes;
  // Time in which copies ran. A disk's reads and writes share it: time of both is divided between them.
  uint64_t write_nanoseconds;
  uint64_t read_nanoseconds;
  uint64_t cpu_nanoseconds;     // that the threads took which copied, of a CPU
  uint64_t queued_write_bytes;  // not yet there
  uint64_t queued_read_bytes;
  uint64_t writes;
  uint64_t reads;
  uint64_t errors;
  uint64_t lock_nanoseconds;       // host memory was being page-locked
  uint64_t lock_wait_nanoseconds;  // of these, opening and writes waited
  int32_t direct;                  // 1: O_DIRECT is in use
} mm_tier_stats;

// One file in `folder`, mode 0600, unlinked as soon as it is open. capacity 0: limited by the file system only.
// bytes_per_second 0: not throttled (a throttle paces reads and writes each; for tests and for sharing a disk).
// folder NULL: no file, so writes end with -ENOSPC; for slots that are lent.
mm_tier* mm_tier_open(const char* folder, uint64_t capacity_bytes, uint64_t bytes_per_second, int workers, char* err,
                      size_t err_len);
// The same; its first `cached_bytes` go through the page cache, as memory that the machine has to spare.
mm_tier* mm_tier_open_cached(const char* folder, uint64_t capacity_bytes, uint64_t bytes_per_second, int workers,
                             uint64_t cached_bytes, char* err, size_t err_len);
// Waits for pieces that are being transferred and cancels the rest. No other call may be under way.
void mm_tier_close(mm_tier*);

// Takes room for `bytes` and queues the write; src must stay valid until the write is done. A negative errno (-ENOSPC,
// ...) means that nothing was taken. A write that fails later is reported by poll and wait; the slot is held until
// freed.
mm_slot mm_tier_write(mm_tier*, const void* src, uint64_t bytes);
// Writes in the calling thread (no GIL, no Python), with the workers' help, ahead of the queue: reclaim uses it. On an
// error no slot is held.
mm_slot mm_tier_write_now(mm_tier*, const void* src, uint64_t bytes);
// A slot over the range [offset, offset + bytes) of a file of the caller's: reads work as for other slots, nothing is
// written, no room is taken. `fd` stays the caller's, open until the slot is freed. A read ends with -ESTALE once the
// size or the time of modification of the file differs from that at this call. A negative errno: no slot is held.
mm_slot mm_tier_lend(mm_tier*, int fd, uint64_t offset, uint64_t bytes);
int mm_tier_check_lent(mm_tier*, mm_slot);  // 0: the file is as it was; -ESTALE
// Queues a read of the slot into dst, behind the slot's own write if that is still under way. Returns 0 or a negative
// errno. At most one read per slot under way.
int mm_tier_read(mm_tier*, mm_slot, void* dst);
// A read in the calling thread.
int mm_tier_read_now(mm_tier*, mm_slot, void* dst);
// 1: nothing under way on this slot and the last operation succeeded; 0: under way; negative errno: the last operation
// failed.
int mm_tier_poll(mm_tier*, mm_slot);
uint64_t mm_tier_ended(mm_tier*);      // the same number as before: no poll says anything new
int mm_tier_known(mm_tier*, mm_slot);  // a poll after mm_tier_ended, without another question to a driver
// Blocks until nothing is under way on this slot; 0 or a negative errno. An operation still in the queue is moved to
// its front.
int mm_tier_wait(mm_tier*, mm_slot);
// Gives the slot back. Queued pieces are cancelled, running pieces are waited for: then src or dst is free again.
void mm_tier_free(mm_tier*, mm_slot);
void mm_tier_stats_get(mm_tier*, mm_tier_stats* out);
// Fault injection for tests: the n-th write from now fails with this errno (0: off).
void mm_tier_inject(mm_tier*, int write_errno, int after_writes, int read_errno, int after_reads);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#ifdef __cplusplus
}
#endif
#endif
