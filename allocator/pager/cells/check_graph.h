// Checks of the graph of cells, versions and recipes, as equations. They hold whenever the graph's lock is free.
//
//   cells      cells[c.index] == c;  the storage of c has c as its cell, or has died
//              pins(c) >= standing_pins(c);  c.version.cell == c
//              absent(c) == (c.absence != none);  resident(c) has bytes;  absent(c) has none
//              offloaded: a slot of the tier;  evicted: c.version.evicted and a recipe;  packed: bits
//   totals     resident_cell_bytes == sum of nbytes over cells that are resident, or being read, and not small,
//                                     + bits_bytes of all
//              root_bytes, escaped_bytes, newborn_bytes, long_pinned_bytes == sum of nbytes over cells with that mark
//              absent_cells == number of absent cells, those that are being read among them
//              recipe_bytes >= sum of bytes of recipes + nbytes of kept cells
//   versions   v.needed == number of outputs that pull, over the recipes that read v, once for each argument that is v
//              v.refs >= (1 if the cell of v has it, and its storage lives) + number of arguments that are v
//              v.readers == the recipes with an argument that is v, once for each;  lost(v) or v can be had
//   recipes    r.refs >= number of outputs;  o.recipe == r for each output o;  broken(r) or all that it reads can be
//   had
//
// The sums are skipped while a cell is being moved by another thread. Known limitation: recipe_bytes and refs are
// compared from below, because an op that another thread records holds some before its recipe is attached.
#pragma once

#include <atomic>
#include <string>

namespace memmgr::pager {

// The first equation that does not hold, with its figures; empty: all hold. No lock is held.
std::string broken_equation();

// After an op: throws if an equation does not hold. `share`: the part of the program's time that checks may take. 0: no
// checks, the default. 1: a check after every op, the default under MEMMGR_DEBUG=1. From the first call on, ranks of
// locks are checked, too.
void check_graph_after_op();
void set_graph_checks(double share);
extern std::atomic<bool> checks_graph;

}  // namespace memmgr::pager
