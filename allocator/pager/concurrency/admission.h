// Admission (rule 3): an op states the bytes that it will pin before it pins. It waits without pins while the pins of
// other ops leave no room. One op is always admitted.
#pragma once

#include <cstdint>

#include "base/session.h"

namespace memmgr::pager {

class Admitted {
 public:
  // alone: waits until no other op runs.
  // foreign: an op of another library. It may wait for other threads, whose ops may wait for room: they do not wait for
  // its end once its thread has slept for a second.
  Admitted(Session& session, uint64_t bytes, bool alone, bool foreign = false);
  ~Admitted();
  Admitted(const Admitted&) = delete;
  Admitted& operator=(const Admitted&) = delete;

 private:
  void wait_for_admission(Session& session, bool alone);

  const uint64_t asked_;
  unsigned long foreign_ = 0;  // the thread, by the system's number; 0: the op is torch's
};

// An op that runs alone and finds no room waits so often for other threads to write to their newborns: on a busy
// machine a thread may not run for long.
constexpr int kMostPauses = 200;
constexpr double kPauseSeconds = 0.005;

bool others_are_running(bool inside);  // inside: this thread has been admitted
void wait_for_others(double seconds);

}  // namespace memmgr::pager
