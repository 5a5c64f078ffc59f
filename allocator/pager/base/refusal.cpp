#include "base/refusal.h"

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <utility>

namespace memmgr::pager {

static thread_local uint64_t tl_refused_bytes = 0;
static thread_local std::string tl_refused_text;
static thread_local std::string tl_last_text;      // of the last one, also once an error has taken its text
static thread_local uint64_t tl_last_refusal = 0;  // its number among those of all threads
std::atomic<uint64_t> refusals{0};
static thread_local bool tl_onednn_was_on = false;  // at the last one

void begin_refusal(uint64_t bytes, const std::string& text) {
  tl_refused_bytes = bytes;
  tl_refused_text = tl_last_text = text;
  tl_last_refusal = ++refusals;
  tl_onednn_was_on = at::globalContext().userEnabledMkldnn();
}

std::string refusal() { return std::exchange(tl_refused_text, {}); }
uint64_t refused_bytes() {
  tl_refused_text.clear();
  return std::exchange(tl_refused_bytes, 0);
}
void refuse_beside(uint64_t nbytes) { tl_refused_bytes += nbytes; }

bool OneDnnStaysOn::switch_on() const {
  const bool refused = tl_last_refusal > before_;  // within this kernel, and not another thread
  if (!refused || !tl_onednn_was_on || at::globalContext().userEnabledMkldnn()) return false;
  at::globalContext().setUserEnabledMkldnn(true);
  return true;
}

void OneDnnStaysOn::throw_refusal_of_kernel() const {
  if (!switch_on()) return;
  throw c10::OutOfMemoryError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, tl_last_text);
}

}  // namespace memmgr::pager
