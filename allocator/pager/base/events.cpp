#include "base/events.h"

#include <utility>

#include "base/lock.h"
#include "base/no_destructor.h"

namespace memmgr::pager {

std::atomic<bool> watched{false};

namespace {

constexpr size_t kMostKeys = 4096;

struct Events {
  Lock& lock = lock_of(LockId::kEvents);
  EventSums noted GUARDED_BY(lock);
};
NoDestructor<Events> events;

}  // namespace

void add_event(Event what, const OpInfo* op, uint32_t module, uint64_t bytes, uint64_t ns) {
  const EventKey key{static_cast<uint8_t>(what), op, module};
  const Hold lock(events->lock);
  auto it = events->noted.sums.find(key);
  if (it == events->noted.sums.end()) {
    if (events->noted.sums.size() >= kMostKeys) {
      events->noted.unlisted++;
      return;
    }
    it = events->noted.sums.emplace(key, EventSum{}).first;
  }
  it->second.count++;
  it->second.bytes += bytes;
  it->second.ns += ns;
}

EventSums take_events() {
  const Hold lock(events->lock);
  return std::exchange(events->noted, {});
}

void watch_events(bool on) {
  watched.store(on);
  take_events();
}

void end_watch() { watched.store(false); }

static const bool renews_watch = in_forked_child(&end_watch);

}  // namespace memmgr::pager
