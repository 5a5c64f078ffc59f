#include "memmgr/device.h"
#include <cerrno>
extern "C" {
const mm_driver* mm_driver_load(const char*, char*, size_t){return nullptr;}
mm_device* mm_device_open(const mm_driver*, int, uint64_t, int, char*, size_t){return nullptr;}
mm_arena* mm_device_arena(mm_device*){return nullptr;}
int mm_device_ordinal(mm_device*){return 0;}
void* mm_device_alloc(mm_device*, size_t, mm_stream, int){return nullptr;}
void* mm_device_try_alloc(mm_device*, size_t, uint64_t, mm_stream){return nullptr;}
void mm_device_free(mm_device*, void*){}
void mm_device_used(mm_device*, void*, mm_stream){}
int mm_device_wait(mm_device*, mm_stream, mm_stream){return 0;}
mm_stream mm_device_home(mm_device*, const void*){return nullptr;}
int mm_device_synchronize(mm_device*){return 0;}
uint64_t mm_device_trim(mm_device*, uint64_t){return 0;}
int mm_device_copy(mm_device*, void*, const void*, size_t, mm_stream){return 0;}
int mm_device_fetch(mm_device*, void*, const void*, size_t, mm_stream){return 0;}
void mm_device_stats_get(mm_device*, mm_device_stats*){}
mm_tier* mm_tier_open_host(mm_device*, uint64_t, char*, size_t){return nullptr;}
int mm_tier_order(mm_tier* t, mm_slot s){return mm_tier_wait(t,s);}
int mm_tier_use(mm_tier* t, mm_slot s, mm_stream){return mm_tier_wait(t,s);}
const void* mm_tier_bytes(mm_tier*, mm_slot){return nullptr;}
}
