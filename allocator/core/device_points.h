// Points: events with times in the streams of a program, between which the device works on an op. The host's clock
// measures only how long the op took to queue.
#pragma once

#include <vector>

#include "device.h"
#include "lock.h"

namespace memmgr {

class Points {
 public:
  explicit Points(Device* device) : device_(device) {}
  ~Points();
  Points(const Points&) = delete;
  Points& operator=(const Points&) = delete;

  // The number of a point at the stream's tail; -1: none (a capture, an error, or there are too many).
  int Add(CUstream stream);
  // Seconds from one to another; the CPU waits for the second. Negative: not known.
  double Between(int first, int second);

 private:
  CUevent Event(int number);

  Device* const device_;
  Lock lock_;
  std::vector<CUevent> events_;
};

}  // namespace memmgr
