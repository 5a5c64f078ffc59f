#include "base/events.h"

#include <mutex>
#include <utility>

namespace memmgr::pager {

std::atomic<bool> watched{false};

namespace {

constexpr size_t kMostKeys = 4096;

struct Events {
  std::mutex lock;  // a leaf, taken under the graph's lock, too
  EventSums noted;
};
Events& events() {
  static auto* e = new Events;
  return *e;
}

}  // namespace

void add_event(Event what, const OpInfo* op, uint32_t module, uint64_t bytes, uint64_t ns) {
  const EventKey key{static_cast<uint8_t>(what), op, module};
  std::lock_guard<std::mutex> lock(events().lock);
  auto it = events().noted.sums.find(key);
  if (it == events().noted.sums.end()) {
    if (events().noted.sums.size() >= kMostKeys) {
      events().noted.unlisted++;
      return;
    }
    it = events().noted.sums.emplace(key, EventSum{}).first;
  }
  it->second.count++;
  it->second.bytes += bytes;
  it->second.ns += ns;
}

EventSums take_events() {
  std::lock_guard<std::mutex> lock(events().lock);
  return std::exchange(events().noted, {});
}

void watch_events(bool on) {
  watched.store(on);
  take_events();
}

void end_watch() { watched.store(false); }

void forget_watch_in_child() {
  new (&events().lock) std::mutex;
  watched.store(false);
}

}  // namespace memmgr::pager
