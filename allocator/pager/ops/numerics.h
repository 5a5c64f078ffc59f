// The global switches that decide how an op computes (rule 7). A recipe keeps them as one interned id.
#pragma once

#include <cstdint>

namespace memmgr::pager {

int numerics_now();

// Sets the switches to those of `id` for its lifetime. Nothing is touched where they are the same.
class NumericsGuard {
 public:
  explicit NumericsGuard(int id);
  ~NumericsGuard();
  NumericsGuard(const NumericsGuard&) = delete;
  NumericsGuard& operator=(const NumericsGuard&) = delete;

 private:
  int before_ = -1;
};

}  // namespace memmgr::pager
