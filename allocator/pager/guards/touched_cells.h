// Frame: the cells that one op touches, pinned while it runs.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "base/clock.h"
#include "cells/lifetime.h"
#include "cells/types.h"

namespace memmgr::pager {

struct Touched {
  Cell* cell;
  bool written;
};

class Frame {
 public:
  explicit Frame(bool adopts = true) : adopts_(adopts) {}  // or are cells alone of interest?
  ~Frame() { release(); }
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;

  // What it adopts may wait for room: before the op is admitted.
  void may_wait(bool on) { may_wait_ = on; }

  // The op reads one element at most: a mapped storage for which there is no room need not be a cell yet.
  void reads_hardly(bool on) { reads_hardly_ = on; }

  void tensor(c10::TensorImpl* t, bool written);

  void storage(c10::StorageImpl* s, bool written);

  void value(const c10::IValue& v, bool written);

  // After this all cells are pinned and resident.
  void pin_all();

  void release();

  // Pins that somebody else gives back.
  std::vector<Cell*> hand_over() {
    std::vector<Cell*> taken;
    for (size_t i = 0; i < pinned_; ++i) taken.push_back(cells_[i].cell);
    pinned_ = 0;
    return taken;
  }

  // Before the op: what is written gets a new version, and whoever needs the old bytes has them (rule 4).
  void begin_writes();

  // Something is declared to be written, cell or not.
  bool declares_writes() const { return declares_writes_; }

  bool writes() const {
    if (writes_small_) return true;
    for (const Touched& t : cells_)
      if (t.written) return true;
    return false;
  }

  // An op has touched them: they hold what somebody wrote there.
  void end_newborns();

  uint64_t bytes() const { return bytes_; }
  bool empty() const { return cells_.empty(); }
  const c10::SmallVector<Touched, 12>& cells() const { return cells_; }
  void add_pinned(Cell* c) {  // an output
    pin(c, ticks());
    take_pin(c);
  }
  void take_pin(Cell* c) {  // that the caller has
    cells_.push_back({c, false});
    std::swap(cells_[pinned_], cells_.back());
    ++pinned_;
  }

 private:
  // What is made again takes room beside what the op holds already. With a tier each is made with nothing else pinned
  // and written below; after that all that is left is to read them back.
  bool one_by_one();

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
