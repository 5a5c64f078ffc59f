#include "window.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace memmgr {
namespace {

constexpr double kTick = 1e-9;  // an access "just now" is stale by something, and prices stay finite
constexpr double kLeast = 1e-30;

// cost / staleness^exponent for all pieces that have one. The exponents in use have a cheap form.
void Age(std::vector<double>* price, const std::vector<double>& staleness, double exponent) {
  double* const cost = price->data();
  const double* const stale = staleness.data();
  const size_t n = price->size();
  if (exponent == 0) return;
  if (exponent == 1) {
    for (size_t i = 0; i < n; ++i) cost[i] /= stale[i];
  } else if (exponent == 0.5) {
    for (size_t i = 0; i < n; ++i) cost[i] /= std::sqrt(stale[i]);
  } else if (exponent == 0.25) {
    for (size_t i = 0; i < n; ++i) cost[i] /= std::sqrt(std::sqrt(stale[i]));
  } else {
    for (size_t i = 0; i < n; ++i) cost[i] /= std::pow(stale[i], exponent);
  }
}

}  // namespace

void Chooser::Gather(const Block* first, uint64_t limit, double now, double exponent) {
  block_.clear();
  bytes_.clear();
  price_.clear();
  staleness_.clear();
  for (const Block* block = first; block != nullptr; block = block->next) {
    uint64_t bytes = block->bytes;
    double cost = 0, staleness = 1;
    if (block->live) {
      cost = block->cost;
      if (cost >= 0) {  // a price of 0 is a run's
        cost = std::max(cost, kLeast);
        staleness = std::max(now - block->last_access, kTick);
      }
    } else if (block->next == nullptr) {
      if (block->offset >= limit) break;
      bytes = std::min(bytes, limit - block->offset);
    }
    block_.push_back(block);
    bytes_.push_back(bytes);
    price_.push_back(cost);
    staleness_.push_back(staleness);
  }
  Age(&price_, staleness_, exponent);
}

bool Chooser::Choose(Search how, Goal goal) {
  victims_.clear();
  freed_ = 0;
  if (how == Search::kWindow && goal.bytes > 0) {
    if (!Window(goal.bytes)) return false;
    if (freed_ >= goal.needed) return true;
    // Blocks beyond the limit can make a request short of bytes although the window is long enough.
    return ByScore({0, goal.needed}, false);
  }
  return ByScore(goal, how == Search::kDte);
}

// Two pointers. For each right end the cheapest window is the shortest, because no price is negative, and its left end
// never moves back: O(n). The sums are kept in integers (49 bits for the dearest of 10,000 pieces), so that adding and
// taking away leaves no rounding errors behind.
bool Chooser::Window(uint64_t bytes) {
  const size_t n = block_.size();
  double dearest = 0;
  for (size_t i = 0; i < n; ++i) dearest = std::max(dearest, price_[i]);
  double scale = 1;
  if (dearest > 0) {
    int exponent = 0;
    std::frexp(std::min(dearest, std::numeric_limits<double>::max()), &exponent);
    scale = std::ldexp(1.0, std::min(63 - static_cast<int>(std::bit_width(n)) - exponent, 1000));
  }
  const auto units = [&](size_t i) { return static_cast<uint64_t>(price_[i] * scale); };
  uint64_t held = 0, sum = 0, least = UINT64_MAX;
  size_t left = 0, best_left = 0, best_right = 0;
  for (size_t right = 0; right < n; ++right) {
    if (price_[right] < 0) {
      left = right + 1;
      held = sum = 0;
      continue;
    }
    held += bytes_[right];
    sum += units(right);
    for (; held - bytes_[left] >= bytes; ++left) {
      held -= bytes_[left];
      sum -= units(left);
    }
    if (held >= bytes && sum < least) {
      least = sum;
      best_left = left;
      best_right = right;
    }
  }
  if (least == UINT64_MAX) return false;
  for (size_t i = best_left; i <= best_right; ++i) {
    if (!block_[i]->live) continue;
    victims_.push_back(block_[i]);
    freed_ += bytes_[i];
    price_[i] = 0;
  }
  return true;
}

double Chooser::Score(size_t piece, bool count_neighbours) const {
  uint64_t bytes = bytes_[piece];
  if (count_neighbours) {
    if (piece > 0 && price_[piece - 1] == 0) bytes += before_[piece] - before_[far_end_[piece - 1]];
    if (piece + 1 < block_.size() && price_[piece + 1] == 0)
      bytes += before_[far_end_[piece + 1] + 1] - before_[piece + 1];
  }
  return price_[piece] / static_cast<double>(bytes);
}

// The piece becomes free and joins the runs beside it. Returns the first and the last piece of what they make.
std::pair<size_t, size_t> Chooser::Take(size_t piece) {
  size_t left = piece, right = piece;
  price_[piece] = 0;
  if (piece > 0 && price_[piece - 1] == 0) left = far_end_[piece - 1];
  if (piece + 1 < block_.size() && price_[piece + 1] == 0) right = far_end_[piece + 1];
  far_end_[left] = static_cast<uint32_t>(right);
  far_end_[right] = static_cast<uint32_t>(left);
  longest_ = std::max(longest_, before_[right + 1] - before_[left]);
  return {left, right};
}

bool Chooser::ByScore(Goal goal, bool count_neighbours) {
  const size_t n = block_.size();
  far_end_.resize(n);
  before_.resize(n + 1);
  before_[0] = 0;
  for (size_t i = 0; i < n; ++i) {
    before_[i + 1] = before_[i] + bytes_[i];
    far_end_[i] = static_cast<uint32_t>(i);
  }
  longest_ = 0;
  heap_.clear();
  for (size_t i = 0; i < n; ++i) {
    if (price_[i] == 0) {
      Take(i);
    } else if (price_[i] > 0) {
      heap_.emplace_back(0.0, static_cast<uint32_t>(i));
    }
  }
  // Smallest score first, lowest address among equals. A score with neighbours only ever falls while blocks leave, so
  // that an entry is entered again when a neighbour has left, and old entries of it are skipped.
  for (auto& [score, i] : heap_) score = Score(i, count_neighbours);
  const auto later = [](const auto& a, const auto& b) { return a > b; };
  std::make_heap(heap_.begin(), heap_.end(), later);
  while (freed_ < goal.needed || longest_ < goal.bytes) {
    if (heap_.empty()) return false;
    std::pop_heap(heap_.begin(), heap_.end(), later);
    const size_t i = heap_.back().second;
    heap_.pop_back();
    if (price_[i] == 0) continue;
    victims_.push_back(block_[i]);
    freed_ += bytes_[i];
    const auto [left, right] = Take(i);
    if (!count_neighbours) continue;
    for (const size_t beside : {left - 1, right + 1}) {
      if (beside >= n || price_[beside] <= 0) continue;
      heap_.emplace_back(Score(beside, true), static_cast<uint32_t>(beside));
      std::push_heap(heap_.begin(), heap_.end(), later);
    }
  }
  return true;
}

}  // namespace memmgr
