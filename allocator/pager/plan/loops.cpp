#include "plan/loops.h"

#include <algorithm>

#include "base/lock.h"
#include "base/no_destructor.h"
#include "cells/cell.h"
#include "residency/reclaim.h"
#include "residency/transfer.h"

namespace memmgr::pager {

std::atomic<bool> short_begins_loops{false};

static void memory_is_short() {
  if (C10_UNLIKELY(short_begins_loops.load(std::memory_order_relaxed))) timeline_on = true;
}
static const bool notes_shortage = (room_sources.memory_is_short = &memory_is_short, true);

namespace {

constexpr size_t kLeastOps = 16;  // a shorter turn costs more to end than a plan gains
constexpr size_t kFirstPatience = 64, kMostPatience = 100000;
constexpr size_t kMostKnown = 8;  // loops

// The last turns, handed to the thread that waits for loops.
struct Told {
  Lock& lock = lock_of(LockId::kLoops);
  Condition ended;
  bool stop GUARDED_BY(lock) = false, fresh GUARDED_BY(lock) = false;
  Timeline timeline GUARDED_BY(lock);
  Followed followed GUARDED_BY(lock);
  uint64_t hash GUARDED_BY(lock) = 0;  // of the last turn
  uint64_t same GUARDED_BY(lock) = 0;  // how often it came in a row
};

NoDestructor<Told> told;

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

void LoopSeeker::cut(size_t ops, bool repeats) {
  since_ += ops;
  looped_ |= repeats;
}

void LoopSeeker::passed(size_t ops) {
  longest_pass_ = std::max(longest_pass_, looped_ ? ops : since_ + ops);
  since_ = 0;
  looped_ = false;
}

void LoopSeeker::forget(const Cell* c) {
  const auto forget_in = [&](Beginning& b) {
    std::replace(b.cells.begin(), b.cells.end(), c, static_cast<const Cell*>(nullptr));
  };
  forget_in(at_);
  std::for_each(known_.begin(), known_.end(), forget_in);
}

bool LoopSeeker::Beginning::lost() const {
  return std::all_of(cells.begin(), cells.end(), [](const Cell* c) { return c == nullptr; });
}

bool LoopSeeker::Beginning::met(const OpInfo* op, const Frame& frame) const {
  const auto touched = [&](const Cell* known) {
    return !known ||
           std::any_of(frame.cells().begin(), frame.cells().end(), [&](const Touched& t) { return t.cell == known; });
  };
  return op == info && !lost() && std::all_of(cells.begin(), cells.end(), touched);
}

bool LoopSeeker::begin_at(const OpInfo* info, const Frame& frame) {
  Beginning here{info, {}, 0};
  for (const Touched& t : frame.cells())
    if (t.cell->serial < begun_) here.cells.push_back(t.cell);
  if (here.cells.empty()) return false;
  at_ = std::move(here);
  begun_ = serial_of_next_locked();
  better_ = 0;
  between_.clear();
  return true;
}

bool LoopSeeker::begin_again(size_t ops, const OpInfo* info, const Frame& frame) {
  if (at_.ops && ops <= at_.ops) return false;  // it may be a part of this loop
  const auto found = std::find_if(known_.begin(), known_.end(), [&](const Beginning& b) { return b.met(info, frame); });
  if (found == known_.end()) return false;
  at_ = *found;
  begun_ = serial_of_next_locked();
  better_ = 0;
  settled_ = true;
  patience_ = std::max(kFirstPatience, 2 * at_.ops);
  return true;
}

void LoopSeeker::remember() {
  const auto gone = [&](const Beginning& b) { return b.lost() || (b.info == at_.info && b.cells == at_.cells); };
  known_.erase(std::remove_if(known_.begin(), known_.end(), gone), known_.end());  // C++17: torch 2.11
  known_.insert(known_.begin(), at_);
  if (known_.size() > kMostKnown) known_.pop_back();
}

void LoopSeeker::settle(const Timeline& turn) {
  if (settled_ || between_.size() != turn.ops.size()) return;
  settled_ = true;
  for (size_t i = 0; i < between_.size(); ++i) between_[i] = std::min(between_[i], turn.ops[i].before);
  const auto longest = std::max_element(between_.begin(), between_.end());
  if (*longest > 2 * between_.front()) better_ = static_cast<size_t>(longest - between_.begin());
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
  if (n >= kLeastOps && at_.met(info, frame)) {
    patience_ = std::max(kFirstPatience, 2 * n);
    better_ = 0;  // the op at that position touched no old cell
    if (turn.before == turn.hash()) {
      settle(turn);
      if (!better_ && at_.ops != n) {
        at_.ops = n;
        remember();
      }
    }
    if (!settled_) {
      between_.clear();
      for (const OpNote& op : turn.ops) between_.push_back(op.before);
    }
    return Turn::kWhole;
  }
  if (begin_again(n, info, frame)) return Turn::kCut;
  const bool late = n >= patience_;
  if (!(late || at_.lost()) || !begin_at(info, frame)) return Turn::kGoesOn;
  if (late) patience_ = std::min(2 * patience_, kMostPatience);
  settled_ = false;
  return Turn::kCut;
}

void end_turn(Session& session, LoopTurn turn) {
  const Timeline& ended = turn.ended;
  const Followed followed = end_following(session, ended.hash(), ended.before, ended.ops.size());
  poll_transfers(session);
  if (!turn.whole || ended.overflow || ended.before != ended.hash()) return;
  session.counters.loop_turns++;
  Told& t = *told;
  {
    const Hold lock(t.lock);
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
  Told& t = *told;
  Hold lock(t.lock);
  t.ended.wait(lock, [&]() REQUIRES(t.lock) { return t.fresh || t.stop; });
  return !t.stop;
}

void begin_wait_for_loop() {
  Told& t = *told;
  const Hold lock(t.lock);
  t.stop = t.fresh = false;
  t.hash = t.same = 0;
}

void end_wait_for_loop() {
  Told& t = *told;
  {
    const Hold lock(t.lock);
    t.stop = true;
  }
  t.ended.notify_one();
}

bool take_loop(Timeline* ended, Followed* followed) {
  Told& t = *told;
  const Hold lock(t.lock);
  if (!t.fresh) return false;
  t.fresh = false;
  *ended = std::move(t.timeline);
  *followed = t.followed;
  return true;
}

}  // namespace memmgr::pager
