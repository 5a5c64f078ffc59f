// Timed: adds the time that it lives to a sum.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>

namespace memmgr {

class Timed {
 public:
  explicit Timed(std::atomic<uint64_t>* sum) : sum_(sum) {}
  ~Timed() {
    *sum_ += std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start_).count();
  }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  std::atomic<uint64_t>* const sum_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace memmgr
