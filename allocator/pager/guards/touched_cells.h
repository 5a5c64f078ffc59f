// Frame: the cells that one op touches, pinned while it runs.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "base/clock.h"
#include "base/session.h"
#include "cells/lifetime.h"
#include "cells/types.h"

namespace memmgr::pager {

struct Touched {
  Cell* cell;
  bool written;
};

class Frame {
 public:
  explicit Frame(Session& session, bool adopts = true)
      : session_(session), adopts_(adopts) {}  // adopts: storages without a cell get one.
  ~Frame() { release(); }
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;

  // Adoption may wait for room. Only before the op is admitted.
  void may_wait(bool on) { may_wait_ = on; }

  // The op reads one element at most: a mapped storage that finds no room need not be a cell yet.
  void reads_hardly(bool on) { reads_hardly_ = on; }

  void tensor(c10::TensorImpl* t, bool written);

  void storage(c10::StorageImpl* s, bool written);

  void value(const c10::IValue& v, bool written);

  // After this all cells are pinned and resident.
  void pin_all();

  void release();

  // Returns the pins, which the caller ends.
  std::vector<Cell*> hand_over() {
    std::vector<Cell*> taken;
    for (size_t i = 0; i < pinned_; ++i) taken.push_back(cells_[i].cell);
    pinned_ = 0;
    return taken;
  }

  // Called before the op. Gives written cells a new version, after the old bytes that recipes need were saved (rule 4).
  void begin_writes();

  // True: the op declares a write, to a cell or to other memory.
  bool declares_writes() const { return declares_writes_; }

  bool writes() const {
    if (writes_small_) return true;
    for (const Touched& t : cells_)
      if (t.written) return true;
    return false;
  }

  // Called after an op has touched the cells: they are no longer uninitialized.
  void end_newborns();

  uint64_t bytes() const { return bytes_; }
  bool empty() const { return cells_.empty(); }
  const c10::SmallVector<Touched, 12>& cells() const { return cells_; }
  void add_pinned(Cell* c) {  // an output
    pin(c, ticks());
    take_pin(c);
  }
  void take_pin(Cell* c) {  // the caller has this pin
    cells_.push_back({c, false});
    std::swap(cells_[pinned_], cells_.back());
    ++pinned_;
  }

 private:
  // Restores evicted cells one at a time and offloads each, then reads all of them back. Rematerialization takes room
  // in addition to the op's pins: this way nothing else is pinned while it runs. Needs a tier.
  bool one_by_one();
  // Lets buffers of a compiled graph leave before their first launch or op, which is this one. No address of theirs has
  // been handed out, so no code can have written to them.
  void end_blank_newborns();

  Session& session_;
  c10::SmallVector<Touched, 12> cells_;
  c10::SmallVector<Touched, 4> small_;
  const bool adopts_;
  bool may_wait_ = false;
  bool reads_hardly_ = false;
  bool writes_small_ = false;
  size_t pinned_ = 0;
  bool declares_writes_ = false;
  uint64_t bytes_ = 0;
};

}  // namespace memmgr::pager
