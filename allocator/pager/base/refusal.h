// Requests of a thread that found no room, and the answer of kernels that catch the exception.
#pragma once

#include <c10/macros/Macros.h>

#include <atomic>
#include <cstdint>
#include <string>

namespace memmgr::pager {

// Records that this thread's request is refused with this text. `bytes`: those that stay, and the request.
void begin_refusal(uint64_t bytes, const std::string& text);
void refuse_beside(uint64_t nbytes);  // this thread needs these bytes in addition to the refused request
uint64_t refused_bytes();             // takes the bytes of a refused try, and forgets its text
std::string refusal();  // takes the error's text; the code between may have turned the exception into another one

// Requests that were refused so far, of all threads.
extern std::atomic<uint64_t> refusals;

// Around a kernel of torch's (rule 7). Torch's products on oneDNN take any exception for a failure of oneDNN: they
// switch it off for the process and compute by BLAS, with other bits. A refused allocation is no such failure, so
// oneDNN is switched on again.
class OneDnnStaysOn {
 public:
  ~OneDnnStaysOn() {
    if (C10_UNLIKELY(refusals.load(std::memory_order_relaxed) != before_)) switch_on();
  }
  // The kernel has returned. Throws the refusal if the kernel has computed without oneDNN because of it.
  void returned() {
    if (C10_UNLIKELY(refusals.load(std::memory_order_relaxed) != before_)) throw_refusal_of_kernel();
  }
  OneDnnStaysOn() = default;
  OneDnnStaysOn(const OneDnnStaysOn&) = delete;
  OneDnnStaysOn& operator=(const OneDnnStaysOn&) = delete;

 private:
  bool switch_on() const;
  void throw_refusal_of_kernel() const;

  const uint64_t before_ = refusals.load(std::memory_order_relaxed);
};

}  // namespace memmgr::pager
