#include "base/seen_threads.h"

#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace memmgr::pager {

void see_this_thread(bool on) { c10::impl::tls_set_dispatch_key_included(kKey, on); }

bool thread_is_seen() { return c10::impl::tls_is_dispatch_key_included(kKey); }

std::atomic<uint32_t> listeners{0};
static thread_local bool tl_may_rest = false, tl_resting = false;

void follow_listeners() {
  const bool rest = tl_may_rest && listeners.load() == 0;
  if (rest == tl_resting) return;
  at::enableRecordFunction(!rest);
  tl_resting = rest;
}

void listen(Listener who, bool on) {
  if (on)
    listeners |= who;
  else
    listeners &= ~static_cast<uint32_t>(who);
  follow_listeners();
}

// Not inside a guard of the dispatcher's keys: its end would restore the keys that it found, those of an unseen thread.
void let_callbacks_rest(bool on) {
  if (on) {
    const auto keys = c10::impl::tls_local_dispatch_key_set().included_;
    tl_may_rest = at::isRecordFunctionEnabled() && keys.remove(kKey) == c10::default_included_set;
    follow_listeners();
  } else if (tl_may_rest) {
    tl_may_rest = tl_resting = false;
    at::enableRecordFunction(true);
  }
}

}  // namespace memmgr::pager
