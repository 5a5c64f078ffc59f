// Until device_abi.cpp has them.
#include "device.h"

extern "C" {

int mm_device_wait(mm_device* device, mm_stream waiter, mm_stream other) {
  return reinterpret_cast<memmgr::Device*>(device)->WaitForTail(waiter, other);
}

int mm_device_wait_block(mm_device* device, mm_stream waiter, const void* p) {
  return reinterpret_cast<memmgr::Device*>(device)->WaitForTouched(waiter, p);
}

}  // extern "C"
