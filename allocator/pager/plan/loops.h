// Periods of a program without a backward: the turns of the loop that it goes through (a token, a batch of an
// evaluation), found in its ops alone. A loop is looked for where gradients are off and memory has been short: before
// the first backward, and after one once more ops have run than in two passes.
#pragma once

#include <vector>

#include "cells/types.h"
#include "guards/touched_cells.h"
#include "ops/op_info.h"
#include "plan/follow.h"
#include "plan/timeline.h"

namespace memmgr::pager {

// Where a loop begins. An op, met again with the same cells, ends a turn; one that is not met again for long was not
// in the loop, and the op at hand takes its place, for twice as long (Brent 1980, "An improved Monte Carlo
// factorization algorithm", section 2). Once two turns were the same, the loop begins where the program did most
// between two ops (what chooses the next token, what fetches the next batch): a new prompt then begins with a turn.
// What is done for long between two ops once says nothing: of two turns the shorter time counts.
//
// Where a loop began is remembered: after a prompt, a training or another loop its turns begin there again, so they are
// the ones that have a plan.
//
// Known limitations: of loops in loops it finds the inner one that is long enough. What several threads do at once
// repeats itself by chance only. Guarded by the graph's lock.
class LoopSeeker {
 public:
  enum class Turn : uint8_t { kGoesOn, kCut, kWhole };  // cut: what was noted so far is no turn

  void reset(bool wanted);
  // A backward begins: from here on periods are asked for.
  void backward();
  // What was noted so far was no pass, or a turn; a turn that repeats is a loop.
  void cut(size_t ops, bool repeats);
  // The rest of what ends with a backward had so many ops. Where nothing in it was a loop, all of it was a pass.
  void passed(size_t ops);
  // No loop is looked for yet, and so many ops were noted: is this op the first of one?
  bool begins(bool asked, size_t ops, const OpInfo* info, const Frame& frame);
  // What ends before this op.
  Turn ends(const Timeline& turn, const OpInfo* info, const Frame& frame);
  void forget(const Cell* c);

 private:
  // An op that begins turns, known by the cells of old that it touches.
  struct Beginning {
    const OpInfo* info = nullptr;
    c10::SmallVector<const Cell*, 4> cells;  // null: it has died
    size_t ops = 0;                          // of a turn; 0: no two were the same yet

    bool lost() const;
    bool met(const OpInfo* op, const Frame& frame) const;
  };

  // False: the op touches no cell that is old enough.
  bool begin_at(const OpInfo* info, const Frame& frame);
  // The turn was the same as the one before: do turns begin where they should?
  void settle(const Timeline& turn);
  void remember();
  // Another loop that is known begins.
  bool begin_again(size_t ops, const OpInfo* info, const Frame& frame);

  bool wanted_ = false, backwards_ = false;
  size_t longest_pass_ = 0;
  size_t since_ = 0;  // ops that were cut off since the last backward ended
  bool looped_ = false;
  Beginning at_;
  std::vector<Beginning> known_;   // of loops, the latest first
  std::vector<float> between_;     // of the turn before, by position: seconds
  uint64_t begun_ = ~uint64_t{0};  // the serial of what was made next then
  size_t patience_ = 0;            // ops
  size_t better_ = 0;              // the position at which turns shall begin instead; 0: they begin well
  bool settled_ = false;           // and that will not be asked again
};

// Ops are noted as soon as memory is short.
extern std::atomic<bool> short_begins_loops;

struct LoopTurn {
  Timeline ended;
  bool whole = false;
};
void end_turn(LoopTurn turn);

void begin_wait_for_loop();
// Waits for a turn that was the same as the one before and had no plan that was enough; no more of the same than at
// every doubling of their count. False: the budget ends.
bool wait_for_loop();
void end_wait_for_loop();
// The last of them; false: it was taken already.
bool take_loop(Timeline* ended, Followed* followed);

}  // namespace memmgr::pager
