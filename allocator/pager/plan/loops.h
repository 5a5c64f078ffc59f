// Periods of a program without a backward: the turns of its loop (a token, a batch of an evaluation), found in its ops
// alone. A loop is looked for where gradients are off and memory has been short. That is before the first backward, and
// after a backward once more ops have run than in two passes.
#pragma once

#include <vector>

#include "cells/types.h"
#include "guards/touched_cells.h"
#include "ops/op_info.h"
#include "plan/follow.h"
#include "plan/timeline.h"

namespace memmgr::pager {

// Finds where a loop begins. An op that comes again with the same cells ends a turn. An op that does not come again for
// long was not in the loop: the current op replaces it, for twice as long (Brent 1980, "An improved Monte Carlo
// factorization algorithm", section 2). Once two turns were the same, the beginning moves to the longest time between
// two ops (the program chooses the next token there, or fetches the next batch): a new prompt then begins with a turn.
// A time that was long only once does not count: the shorter of two turns' times is taken.
//
// The beginning of a loop is remembered: after a prompt, a training or another loop its turns begin there again, so
// they match their plan.
//
// Known limitations: of nested loops it finds the inner one that is long enough. Ops of several threads repeat
// themselves only by chance. Guarded by the graph's lock.
class LoopSeeker {
 public:
  enum class Turn : uint8_t { kGoesOn, kCut, kWhole };  // kCut: the ops noted so far are no turn

  void reset(bool wanted);
  // A backward begins: periods are asked for until `reset`.
  void backward();
  // The ops noted so far were no pass, or were a turn. A turn that repeats is a loop.
  void cut(size_t ops, bool repeats);
  // A backward ends a period whose last part had so many ops. If no part was a loop, all parts were one pass.
  void passed(size_t ops);
  // Returns true if this op is the first of a loop. No loop is known yet, and so many ops were noted.
  bool begins(bool asked, size_t ops, const OpInfo* info, const Frame& frame) REQUIRES(graph_lock());
  // Returns how the noted ops end before this op.
  Turn ends(const Timeline& turn, const OpInfo* info, const Frame& frame) REQUIRES(graph_lock());
  void forget(const Cell* c);

 private:
  // An op that begins turns, recognized by the cells that it touches and that are older than the turn.
  struct Beginning {
    const OpInfo* info = nullptr;
    c10::SmallVector<const Cell*, 4> cells;  // null: the cell has ended
    size_t ops = 0;                          // of a turn; 0: no two turns were the same yet

    bool lost() const;
    bool met(const OpInfo* op, const Frame& frame) const;
  };

  // Returns false if the op touches no cell that is old enough.
  bool begin_at(const OpInfo* info, const Frame& frame) REQUIRES(graph_lock());
  // The turn was the same as the one before: checks once if turns should begin at another op.
  void settle(const Timeline& turn);
  void remember();
  // Continues another remembered loop if this op begins it.
  bool begin_again(size_t ops, const OpInfo* info, const Frame& frame) REQUIRES(graph_lock());

  bool wanted_ = false, backwards_ = false;
  size_t longest_pass_ = 0;
  size_t since_ = 0;  // ops that were cut off since the last backward ended
  bool looped_ = false;
  Beginning at_;
  std::vector<Beginning> known_;   // of loops, the latest first
  std::vector<float> between_;     // seconds, by position, of the turn before
  uint64_t begun_ = ~uint64_t{0};  // cells with smaller serials are older than the turn
  size_t patience_ = 0;            // ops
  size_t better_ = 0;              // the position at which turns shall begin instead; 0: they begin well
  bool settled_ = false;           // True once `better_` was decided.
};

// True: ops are noted as soon as memory is short.
extern std::atomic<bool> short_begins_loops;

struct LoopTurn {
  Timeline ended;
  bool whole = false;
};
void end_turn(Session& session, LoopTurn turn);

void begin_wait_for_loop();
// Waits for a turn that was the same as the one before and was not followed to its end by a plan with enough room. Of
// turns that stay the same it returns at each doubling of their count only. False: the budget ends.
bool wait_for_loop();
void end_wait_for_loop();
// Takes the last such turn. False: it was taken already.
bool take_loop(Timeline* ended, Followed* followed);

}  // namespace memmgr::pager
