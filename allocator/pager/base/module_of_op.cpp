#include "base/module_of_op.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace memmgr::pager {

namespace {

// The module of an op is recorded in a pass with torch's module hooks. Later passes find it by the recorded op's place
// in the pass: the hooks cost microseconds a module, this costs nanoseconds a recipe. A program may take several routes
// through its passes; some are kept.
using Route = std::vector<std::pair<const OpInfo*, uint32_t>>;
struct Place {
  std::vector<Route> known;
  Route learned;  // of this pass, so far
  size_t current = 0, at = 0, next = 0;
};
thread_local Place place;
thread_local uint32_t tl_module = 0;
constexpr size_t kMostRoutes = 8, kLongestRoute = 1 << 20, kLookAhead = 16;
std::atomic<bool> learning{false};
std::atomic<uint64_t> mispredicted{0};  // ops that differ from the recorded route

bool same_ops(const Route& a, const Route& b, size_t n) {
  return std::equal(a.begin(), a.begin() + static_cast<ptrdiff_t>(n), b.begin(),
                    [](const auto& x, const auto& y) { return x.first == y.first; });
}

}  // namespace

void end_pass_of_modules() {
  Place& p = place;
  p.at = 0;
  if (p.learned.empty()) return;
  for (p.current = 0; p.current < p.known.size(); ++p.current) {
    const Route& route = p.known[p.current];
    if (route.size() == p.learned.size() && same_ops(route, p.learned, route.size())) break;
  }
  if (p.current == p.known.size()) {
    if (p.known.size() < kMostRoutes)
      p.known.emplace_back();
    else
      p.current = p.next++ % kMostRoutes;
  }
  p.known[p.current] = std::move(p.learned);
  p.learned.clear();
}

void set_current_module(uint32_t number) { tl_module = number; }
void learn_modules(bool on) { learning.store(on); }
uint64_t take_mispredicted() { return mispredicted.exchange(0); }

uint32_t current_module() { return tl_module; }
uint32_t current_place() {
  if (!learning.load(std::memory_order_relaxed)) return kUnknownPlace;
  return tl_module ? tl_module : uint32_t{kOutside};
}

uint32_t module_of_recorded(const OpInfo* info) {
  Place& p = place;
  if (learning.load(std::memory_order_relaxed)) {
    if (p.learned.size() < kLongestRoute) p.learned.emplace_back(info, current_place());
    return current_place();
  }
  const auto fits = [&](const Route& route, size_t i) { return i < route.size() && route[i].first == info; };
  if (p.current < p.known.size() && !fits(p.known[p.current], p.at)) {
    const Route& was = p.known[p.current];
    for (size_t i = 0; i < p.known.size(); ++i)
      if (fits(p.known[i], p.at) && was.size() >= p.at && same_ops(was, p.known[i], p.at)) {
        p.current = i;
        break;
      }
  }
  if (p.current < p.known.size()) {
    const Route& route = p.known[p.current];
    // There may be one op more or less than was recorded, and the rest be the same.
    for (size_t i = p.at; i < p.at + kLookAhead; ++i)
      if (fits(route, i)) {
        if (i != p.at) mispredicted.fetch_add(1, std::memory_order_relaxed);
        p.at = i + 1;
        return route[i].second;
      }
  }
  mispredicted.fetch_add(1, std::memory_order_relaxed);
  return 0;
}

}  // namespace memmgr::pager
