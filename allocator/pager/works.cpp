#include "works.h"

#include <list>

namespace memmgr::pager {

std::atomic<uint64_t> in_flight_bytes{0};

namespace {

struct InFlight {
  c10::weak_intrusive_ptr<c10::intrusive_ptr_target> work;
  std::vector<Cell*> pinned;
};

struct Works {
  std::mutex& lock = taken_by_forks(new std::mutex);
  std::list<InFlight> all;
  std::atomic<size_t> count{0};
};

Works& works() {
  static auto* w = new Works;
  return *w;
}

}  // namespace

void keep_until_done(const c10::intrusive_ptr<c10::intrusive_ptr_target>& work, std::vector<Cell*> pinned) {
  Works& w = works();
  std::lock_guard<std::mutex> lock(w.lock);
  for (const Cell* c : pinned) in_flight_bytes += c->nbytes;
  w.all.push_back({c10::weak_intrusive_ptr<c10::intrusive_ptr_target>(work), std::move(pinned)});
  w.count = w.all.size();
}

static void end_works(bool all) {
  std::vector<Cell*> done;
  {
    Works& w = works();
    std::lock_guard<std::mutex> lock(w.lock);
    for (auto it = w.all.begin(); it != w.all.end();) {
      if (!all && !it->work.expired()) {
        ++it;
        continue;
      }
      done.insert(done.end(), it->pinned.begin(), it->pinned.end());
      it = w.all.erase(it);
    }
    w.count = w.all.size();
  }
  for (Cell* c : done) {
    in_flight_bytes -= c->nbytes;
    unpin(c);
  }
}

void poll_works() { end_works(false); }
void forget_works() { end_works(true); }

size_t works_in_flight() { return works().count.load(); }

}  // namespace memmgr::pager
