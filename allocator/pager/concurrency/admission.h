// Admission (rule 3): an op states what it will pin before it pins, and waits with nothing pinned where the pins of
// others leave no room. One op is always admitted.
#pragma once

#include <cstdint>

namespace memmgr::pager {

class Admitted {
 public:
  // alone: wait until nobody else runs.
  Admitted(uint64_t bytes, bool alone);
  ~Admitted();
  Admitted(const Admitted&) = delete;
  Admitted& operator=(const Admitted&) = delete;

 private:
  const uint64_t asked_;
};

// Who runs alone and finds no room waits so often for others to write to what they have made: on a busy machine a
// thread may not run for long.
constexpr int kMostPauses = 200;
constexpr double kPauseSeconds = 0.005;

bool others_are_running(bool inside);  // has this thread been admitted?
void wait_for_others(double seconds);
void forget_admission_in_child();

}  // namespace memmgr::pager
