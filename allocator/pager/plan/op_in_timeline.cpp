#include "plan/op_in_timeline.h"

#include <optional>

#include "base/clock.h"
#include "base/lock.h"
#include "base/no_destructor.h"
#include "cells/cell.h"
#include "plan/access_order.h"
#include "plan/follow.h"
#include "plan/loops.h"
#include "recipes/op_signature.h"
#include "recipes/recipe.h"

namespace memmgr::pager {

namespace {

NoDestructor<LoopSeeker> seeker OF_GRAPH;

Timeline begin_next(const Session& session, Period& p, bool noted) REQUIRES(graph_lock()) {
  Timeline ended = begin_next_locked(session, p, noted);
  use_order_locked(false);
  return ended;
}

// Returns the turn that ends before this op, or the ops that were noted before a loop was looked for.
std::optional<LoopTurn> turn_locked(const Session& session, Period& p, const OpInfo* info, const Frame& frame)
    REQUIRES(graph_lock()) {
  if (makes_recipes() || p.noted.turn >= 0) return std::nullopt;
  auto how = LoopSeeker::Turn::kCut;
  if (p.loop)
    how = seeker->ends(p.noted, info, frame);
  else if (!seeker->begins(p.asked, p.noted.ops.size(), info, frame))
    return std::nullopt;
  if (how == LoopSeeker::Turn::kGoesOn) return std::nullopt;
  const uint64_t last_end = p.last_end;
  LoopTurn turn{begin_next(session, p, true), how == LoopSeeker::Turn::kWhole};
  seeker->cut(turn.ended.ops.size(), turn.whole && turn.ended.before == turn.ended.hash());
  p.loop = true;
  if (turn.whole) learn_order_locked(turn.ended, p.previous);
  if (turn.whole && turn.ended.before == turn.ended.hash()) keep_steady_locked(turn.ended, p);
  use_order_locked(true);
  p.last_end = last_end;  // the time since then is a part of the new turn
  if (!turn.whole) p.noted.before = 0;
  return turn;
}

}  // namespace

void Moment::begins(OpInfo* info, const Frame& frame, bool follow) {
  const uint64_t now = ticks();
  uint32_t at;
  {
    Hold lock(graph_lock());
    Period& p = period_locked();
    if (std::optional<LoopTurn> turn = turn_locked(session_, p, info, frame)) {
      lock.unlock();
      end_turn(session_, std::move(*turn));
      lock.lock();
    }
    if (p.noted.ops.size() >= kMostOps) {
      p.noted.overflow = true;
      timeline_on = false;
      return;
    }
    at = begin_op_locked(session_, p, info, now);
    for (const Touched& t : frame.cells()) {
      touch_locked(p, t.cell, t.written, false);
      if (t.cell->in_turn) touch_in_order_locked(t.cell);
    }
    p.noted.hashes.push_back(p.running);
    position_ = at;
    follow_position_locked(session_, at, p.running, p.noted.before);
  }
  if (follow) follow_before(session_, at);
}

void Moment::ended(OpInfo* info, Cell* const* made, size_t n, double seconds, uint64_t scratch, OpTimer* timer) {
  if (position_ < 0) {
    if (n == 0) return;
    begins(info, Frame(session_), false);  // the op has run: actions that are due wait for the next op
    if (position_ < 0) return;
  }
  const Hold lock(graph_lock());
  Period& p = period_locked();
  const auto at = static_cast<size_t>(position_);
  if (at + 1 != p.noted.ops.size()) return;  // another thread's op came between, or the period has ended
  OpNote& note = p.noted.ops[at];
  // An uninitialized output needs no recipe.
  const auto tell_recipe = [](TouchNote* t, const Cell* c) REQUIRES(graph_lock()) {
    const Version* v = c->version;
    if (v && (v->recipe || v->uninitialized)) t->flags |= kTouchRecipe;
    if (v && v->recipe) t->bits = static_cast<uint32_t>(v->recipe->kind->bits_bytes.load());
  };
  for (size_t i = note.first_touch; i < p.noted.touches.size(); ++i) {
    TouchNote& t = p.noted.touches[i];
    if ((t.flags & kTouchWrites) && p.live[t.ordinal]) tell_recipe(&t, p.live[t.ordinal]);
  }
  uint64_t bytes = 0;
  for (size_t i = 0; i < n; ++i) {
    if (made[i]->period == p.number) continue;  // the op returned the same cell twice
    touch_locked(p, made[i], false, true);
    tell_recipe(&p.noted.touches.back(), made[i]);
    bytes += made[i]->nbytes;
  }
  note.seconds = static_cast<float>(seconds);
  if (timer) timer->tell(&p.noted, at);
  note.scratch = scratch > bytes ? scratch - bytes : 0;
  p.last_end = ticks();
  ended_ = true;
}

void Moment::left() {
  if (!ended_) return;
  follow_after(session_, static_cast<uint32_t>(position_));
  read_in_order(session_);
  if (C10_LIKELY(!times_ops.load(std::memory_order_relaxed))) return;
  const Hold lock(graph_lock());  // the host has done this work while the device runs the op
  period_locked().last_end = ticks();
}

void turn_period(Session& session) {
  if (!timeline_on.load(std::memory_order_relaxed) && !short_begins_loops.load(std::memory_order_relaxed)) return;
  bool cut;
  {
    const Hold lock(graph_lock());
    Period& p = period_locked();
    seeker->backward();
    cut = p.loop;
    if (cut) seeker->cut(begin_next(session, p, false).ops.size(), false);  // a part of a pass is no pass
    p.noted.backwards++;
    if (p.noted.turn < 0) p.noted.turn = static_cast<int64_t>(p.noted.ops.size());
    learn_backward_locked(p.noted, p.live);
    use_order_locked(true);
  }
  if (cut) end_following(session);
}

Timeline next_period(const Session& session, bool noted) {
  const Hold lock(graph_lock());
  Period& p = period_locked();
  seeker->passed(p.noted.ops.size());
  Timeline ended = begin_next(session, p, noted);
  if (noted && !ended.overflow) {
    learn_order_locked(ended, p.previous);
    use_order_locked(true);
  }
  p.asked = noted;
  return ended;
}

void seek_loops(const Session& session, bool on) {
  const Hold lock(graph_lock());
  seeker->reset(on);
  forget_steady_locked();
  forget_order_locked();
  use_order_locked(false);
  if (on) begin_wait_for_loop();
  if (on && session.counters.evictions.load() + session.counters.offloads.load() > 0) timeline_on = true;
}

static const ListensToCells forgets_beginnings({nullptr, [](Cell* c) REQUIRES(graph_lock()) { seeker->forget(c); }});

}  // namespace memmgr::pager
