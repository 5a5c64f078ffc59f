#include "loops.h"

#include <algorithm>
#include <condition_variable>

#include "budget.h"
#include "transfer.h"

namespace memmgr::pager {

std::atomic<bool> short_begins_loops{false};

namespace {

constexpr size_t kLeastOps = 16;  // a shorter turn costs more to end than a plan gains
constexpr size_t kFirstPatience = 64, kMostPatience = 100000;

// What is told to who waits.
struct Told {
  std::mutex& lock = taken_by_forks(new std::mutex);
  std::condition_variable ended;
  bool stop = false, fresh = false;
  Timeline timeline;
  Followed followed;
  uint64_t hash = 0, same = 0;  // of the last one, and how often it came
};

Told& told() {
  static auto* t = new Told;
  return *t;
}

}  // namespace

void LoopSeeker::reset(bool wanted) {
  *this = LoopSeeker();
  wanted_ = wanted;
  short_begins_loops = wanted;
}

void LoopSeeker::backward() {
  backwards_ = true;
  short_begins_loops = false;
}

void LoopSeeker::passed(size_t ops) { longest_pass_ = std::max(longest_pass_, ops); }

void LoopSeeker::forget(const Cell* c) {
  std::replace(cells_.begin(), cells_.end(), c, static_cast<const Cell*>(nullptr));
}

bool LoopSeeker::begin_at(const OpInfo* info, const Frame& frame) {
  c10::SmallVector<const Cell*, 4> old;
  for (const Touched& t : frame.cells())
    if (t.cell->serial < begun_) old.push_back(t.cell);
  if (old.empty()) return false;
  info_ = info;
  cells_ = std::move(old);
  begun_ = serial_of_next_locked();
  better_ = 0;
  return true;
}

bool LoopSeeker::met(const OpInfo* info, const Frame& frame) const {
  const auto touched = [&](const Cell* known) {
    return !known ||
           std::any_of(frame.cells().begin(), frame.cells().end(), [&](const Touched& t) { return t.cell == known; });
  };
  return info == info_ && !lost() && std::all_of(cells_.begin(), cells_.end(), touched);
}

bool LoopSeeker::lost() const {
  return std::all_of(cells_.begin(), cells_.end(), [](const Cell* c) { return c == nullptr; });
}

bool LoopSeeker::begins(bool asked, size_t ops, const OpInfo* info, const Frame& frame) {
  if (!wanted_) return false;
  if (backwards_ ? longest_pass_ == 0 || ops <= 2 * longest_pass_ : asked) return false;
  patience_ = kFirstPatience;
  settled_ = false;
  begun_ = ~uint64_t{0};
  return begin_at(info, frame);
}

LoopSeeker::Turn LoopSeeker::ends(const Timeline& turn, const OpInfo* info, const Frame& frame) {
  const size_t n = turn.ops.size();
  if (better_ && n == better_ && begin_at(info, frame)) return Turn::kCut;
  if (n >= kLeastOps && met(info, frame)) {
    patience_ = std::max(kFirstPatience, 2 * n);
    if (turn.before == turn.hash() && !settled_) {
      settled_ = true;
      const auto longest = std::max_element(turn.ops.begin(), turn.ops.end(),
                                            [](const OpNote& a, const OpNote& b) { return a.before < b.before; });
      if (longest->before > 2 * turn.ops.front().before) better_ = static_cast<size_t>(longest - turn.ops.begin());
    }
    return Turn::kWhole;
  }
  const bool late = n >= patience_;
  if (!(late || lost()) || !begin_at(info, frame)) return Turn::kGoesOn;
  if (late) patience_ = std::min(2 * patience_, kMostPatience);
  settled_ = false;
  return Turn::kCut;
}

void end_turn(LoopTurn turn) {
  const Timeline& ended = turn.ended;
  const Followed followed = end_following(ended.hash());
  poll_transfers();
  if (!turn.whole || ended.overflow || ended.before != ended.hash()) return;
  counters.loop_turns++;
  Told& t = told();
  {
    std::lock_guard<std::mutex> lock(t.lock);
    t.same = t.hash == ended.hash() ? t.same + 1 : 1;
    t.hash = ended.hash();
    if ((followed.to_the_end && !followed.ran_short) || (t.same & (t.same - 1)) != 0) return;
    t.timeline = std::move(turn.ended);
    t.followed = followed;
    t.fresh = true;
  }
  t.ended.notify_one();
}

bool wait_for_loop() {
  Told& t = told();
  std::unique_lock<std::mutex> lock(t.lock);
  t.ended.wait(lock, [&] { return t.fresh || t.stop; });
  return !t.stop;
}

void begin_wait_for_loop() {
  Told& t = told();
  std::lock_guard<std::mutex> lock(t.lock);
  t.stop = t.fresh = false;
  t.hash = t.same = 0;
}

void end_wait_for_loop() {
  Told& t = told();
  {
    std::lock_guard<std::mutex> lock(t.lock);
    t.stop = true;
  }
  t.ended.notify_one();
}

bool take_loop(Timeline* ended, Followed* followed) {
  Told& t = told();
  std::lock_guard<std::mutex> lock(t.lock);
  if (!t.fresh) return false;
  t.fresh = false;
  *ended = std::move(t.timeline);
  *followed = t.followed;
  return true;
}

}  // namespace memmgr::pager
