// The seam between CUDA's allocator in torch (allocator/cuda, one per process: memmgr's, or torch's own behind a door)
// and the pager, which has the budgets and the victims. Tables of functions, because neither links the other.
#ifndef MEMMGR_PLUGIN_H
#define MEMMGR_PLUGIN_H
#include "memmgr/device.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MM_PLUGIN_VERSION 4

// The calls of the allocator while a budget is open, for the device of the budget.
typedef struct {
  int ordinal;
  void* (*allocate)(size_t bytes, mm_stream stream);  // memmgr's: a block; NULL: no room, and no more can be evicted
  uint64_t (*make_room)(uint64_t bytes);              // torch's: returns the bytes evicted, 0: no more can be
  void (*taken)(uint64_t bytes);                      // torch's: a block of this device, by the calling thread
  void (*out_of_memory)(size_t bytes);                // throws c10::OutOfMemoryError
  void (*freed)(uint64_t bytes);                      // a block of this device, by the calling thread
} mm_plugin_hooks;

typedef struct {
  int version;
  int is_torchs;  // torch's own allocator, behind a door
  // The device's memory, opened at the first question; NULL with a text in err.
  mm_device* (*device)(int ordinal, char* err, size_t err_len);
  // The lower of this and the limit of torch.cuda.set_per_process_memory_fraction is the arena's budget.
  void (*set_budget)(int ordinal, uint64_t bytes);
  // Until set again; NULL: no budget is open. The table has to live as long as the process.
  void (*set_hooks)(const mm_plugin_hooks* hooks);
  // As mm_device_try_alloc, counted in torch's statistics.
  void* (*try_allocate)(int ordinal, size_t bytes, uint64_t keep_free, mm_stream home);
  void (*release)(void* p);       // the deleter of all of its memory
  int (*owns)(const void* p);     // any address; torch's own: never
  uint64_t (*live)(int ordinal);  // bytes of live blocks; 0 for a device that is not open
  void (*trim)(int ordinal);      // cached memory beyond the budget goes back to the device
  // Returns the deleter of blocks that torch's own allocator gave before memmgr's was in place; NULL: there are none.
  void (*(*earlier)(void))(void* p);
} mm_plugin;

#ifdef __cplusplus
}
#endif
#endif
