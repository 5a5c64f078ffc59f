// The births of cells: for reports on the holders of memory. No decision depends on them.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "cells/types.h"

namespace memmgr::pager {

// Backwards that have ended in this process: the number of the pass in which a cell is born.
extern std::atomic<uint32_t> passes_ended;

// Called when a cell begins.
void begin_life_locked(Cell* c, Maker maker);

// While it is on, births and ends of large cells are logged. The log of a pass is whole once the pass has ended.
void log_births(bool on);
void end_pass_of_births();

struct Born {
  uint64_t serial, bytes;
  Birth birth;
  Purpose purpose;
};
// Returns the large cells that lived at the highest moment of the last pass that was logged. The most bytes: the
// highest moment of cells, resident or not. Empty: no pass was logged, or it was too long.
std::vector<Born> living_at_peak_locked();

}  // namespace memmgr::pager
