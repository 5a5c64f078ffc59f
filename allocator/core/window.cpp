#include "window.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace memmgr {
namespace {

constexpr float kTick = 1e-9f;  // an access "just now" has a small staleness, so that prices are finite
constexpr float kLeast = 1e-30f;

// cost / staleness^exponent. The exponents in use have a form that the compiler turns into vector instructions.
template <typename Aged>
void ForAll(float* cost, const float* stale, size_t n, Aged aged) {
  for (size_t i = 0; i < n; ++i) cost[i] = aged(cost[i], stale[i]);
}

void Age(float* cost, const float* stale, size_t n, double exponent) {
  if (exponent == 0) return;
  if (exponent == 1) {
    ForAll(cost, stale, n, [](float c, float s) { return c / s; });
  } else if (exponent == 0.5) {
    ForAll(cost, stale, n, [](float c, float s) { return c / std::sqrt(s); });
  } else if (exponent == 0.25) {
    ForAll(cost, stale, n, [](float c, float s) { return c / std::sqrt(std::sqrt(s)); });
  } else {
    const auto power = static_cast<float>(exponent);
    ForAll(cost, stale, n, [power](float c, float s) { return c / std::pow(s, power); });
  }
}

}  // namespace

void Chooser::See(const Block* block, double now, size_t i) {
  block_[i] = block;
  bytes_[i] = block->bytes;
  float cost = 0, staleness = 1;
  if (!block->live && block->pool != 0) {
    cost = kPinnedCost;  // a graph's
  } else if (block->live) {
    cost = block->cost;
    if (cost >= 0) {  // a price of 0 is a run's
      cost = std::max(cost, kLeast);
      staleness = std::max(static_cast<float>(now - block->last_access), kTick);
    }
  }
  price_[i] = cost;
  staleness_[i] = staleness;
}

// From both ends towards the middle: the walk waits for memory at every step, and two walks wait at the same time.
void Chooser::Gather(const Block* first, const Block* last, size_t count, uint64_t limit, double now, double exponent) {
  if (block_.size() < count) {
    const size_t room = 2 * count;
    block_.resize(room);
    bytes_.resize(room);
    price_.resize(room);
    staleness_.resize(room);
    units_.resize(room);
  }
  n_ = count;
  if (!last->live) {  // of the last run only the part below the limit
    --n_;
    if (last->offset < limit) {
      See(last, now, n_);
      bytes_[n_] = std::min(last->bytes, limit - last->offset);
      ++n_;
      --count;
    } else {
      count = n_;
    }
    last = last->previous;
  }
  size_t low = 0, high = count;
  while (low < high) {
    See(first, now, low++);
    first = first->next;
    if (low == high) break;
    See(last, now, --high);
    last = last->previous;
  }
  Age(price_.data(), staleness_.data(), n_, exponent);
}

bool Chooser::Choose(uint64_t run_bytes, uint64_t needed) {
  victims_.clear();
  freed_ = 0;
  if (run_bytes > 0 && !Window(run_bytes)) return false;
  // Blocks beyond the limit can make a request short of bytes although the window is long enough.
  return freed_ >= needed || Cheapest(needed);
}

// Two pointers. For each right end the cheapest window is the shortest, because no price is negative, and its left end
// never moves back: O(n). The sums are of whole numbers (38 bits for the dearest of 10,000 pieces, whose prices have
// 24), so that no rounding errors are left behind.
bool Chooser::Window(uint64_t bytes) {
  float dearest = 0;
  for (size_t i = 0; i < n_; ++i) dearest = std::max(dearest, price_[i]);
  int exponent = 0;
  std::frexp(std::min(dearest, std::numeric_limits<float>::max()), &exponent);
  const double scale = std::ldexp(1.0, 51 - static_cast<int>(std::bit_width(n_)) - exponent);
  constexpr double kWhole = 0x1p52;  // adding it rounds to a whole number
  for (size_t i = 0; i < n_; ++i) units_[i] = (static_cast<double>(price_[i]) * scale + kWhole) - kWhole;
  uint64_t held = 0;
  double sum = 0, least = std::numeric_limits<double>::infinity();
  size_t left = 0, best_left = 0, best_right = 0;
  for (size_t right = 0; right < n_; ++right) {
    if (price_[right] < 0) {
      left = right + 1;
      held = 0;
      sum = 0;
      continue;
    }
    held += bytes_[right];
    sum += units_[right];
    for (; held - bytes_[left] >= bytes; ++left) {
      held -= bytes_[left];
      sum -= units_[left];
    }
    if (held >= bytes && sum < least) {
      least = sum;
      best_left = left;
      best_right = right;
    }
  }
  if (!std::isfinite(least)) return false;
  for (size_t i = best_left; i <= best_right; ++i) {
    if (!block_[i]->live) continue;
    victims_.push_back(block_[i]);
    freed_ += bytes_[i];
    price_[i] = 0;
  }
  return true;
}

// Smallest price per byte first, lowest address among equals.
bool Chooser::Cheapest(uint64_t needed) {
  heap_.clear();
  for (size_t i = 0; i < n_; ++i) {
    if (price_[i] > 0)
      heap_.emplace_back(static_cast<double>(price_[i]) / static_cast<double>(bytes_[i]), static_cast<uint32_t>(i));
  }
  const auto later = [](const auto& a, const auto& b) { return a > b; };
  std::make_heap(heap_.begin(), heap_.end(), later);
  while (freed_ < needed) {
    if (heap_.empty()) return false;
    std::pop_heap(heap_.begin(), heap_.end(), later);
    const size_t i = heap_.back().second;
    heap_.pop_back();
    victims_.push_back(block_[i]);
    freed_ += bytes_[i];
  }
  return true;
}

}  // namespace memmgr
