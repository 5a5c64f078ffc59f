// The births of cells: for reports on the holders of memory. No decision depends on them.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/events.h"
#include "cells/types.h"

namespace memmgr::pager {

// Backwards that have ended in this process: the number of the pass in which a cell is born.
extern std::atomic<uint32_t> passes_ended;

// Called when a cell begins.
void begin_life_locked(Cell* c, Maker maker) REQUIRES(graph_lock());
// Called when the op that made the cell had read another one: the cell may be that one, grown (Birth).
void note_growth_locked(Cell* c, const Cell* read) REQUIRES(graph_lock());

// The origin of a cell in reports.
struct Origin {
  const OpInfo* op;  // null: no op made it
  uint32_t module;   // a module's number, or a NoModule
};
Origin origin_of_locked(const Cell* c) REQUIRES(graph_lock());
// As note_event (version.h), of a cell.
inline void note_event_of_locked(Event what, const Cell* c, uint64_t bytes, uint64_t ns) REQUIRES(graph_lock()) {
  if (C10_LIKELY(!watched.load(std::memory_order_relaxed))) return;
  const Origin origin = origin_of_locked(c);
  add_event(what, origin.op, origin.module, bytes, ns);
}

// While it is on, births and ends of large cells are logged. The log of a pass is whole once the pass has ended.
void log_births(bool on);
void end_pass_of_births();
void forget_births();  // a budget has ended

struct Born {
  uint64_t serial, bytes;
  Birth birth;
  Purpose purpose;
};
// Returns the large cells that lived at the highest moment of the last pass that was logged. The most bytes: the
// highest moment of cells, resident or not. Empty: no pass was logged, or it was too long.
std::vector<Born> living_at_peak_locked() REQUIRES(graph_lock());

}  // namespace memmgr::pager
