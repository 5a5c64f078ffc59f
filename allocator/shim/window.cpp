// Which cells malloc lets go where addresses matter: prices on the arena's blocks, and the search over them (core's
// window.h). Nothing here takes the GIL or calls torch.
//
// A block of the arena is priced while its cell is listed and its bytes are there; `priced_at` remembers which block,
// so that the cell's end finds it whatever became of the storage. Owners are set and cleared under g.mu: an owner that
// the arena hands back while we hold it is a living cell.
#include "shim.h"

namespace memmgr {

void unprice_locked(Cell* c) {
  if (!c->priced_at) return;
  mm_arena_disown(g.arena, c->priced_at, c);
  c->priced_at = nullptr;
}

// Who was never ranked costs what the average byte of the last ranking did; age is what tells them apart.
static double cost_of(const Cell* c) {
  return c->price >= 0 ? c->price : g.price_per_byte * static_cast<double>(c->nbytes);
}

// Called when a cell gets its first handle, gets its bytes back, or is ranked. Later uses by other ops do not refresh
// the age: they come within a few ops of the save, or at the use in backward that ends the cell.
void price_locked(Cell* c) {
  if (g.search < 0 || !g.arena) return;
  void* p = c->listed && c->gone == PRESENT && c->strong ? c->strong->_mutable_data_ptr_no_checks().get() : nullptr;
  if (p != c->priced_at) unprice_locked(c);
  if (!p || !mm_arena_owns(g.arena, p)) return;
  const mm_price price{p, c, cost_of(c), c->last_access};
  mm_arena_price(g.arena, &price, 1);
  c->priced_at = p;
}

static void pin_locked(Cell* c) {
  if (!c->priced_at) return;
  const mm_price pinned{c->priced_at, c, -1.0, 0.0};
  mm_arena_price(g.arena, &pinned, 1);
}

static bool may_leave_locked(const Cell* c) {
  return ours_alone_locked(c) && versions_current(c) && !c->incoming.get() &&
         ((g.may_evict && can_evict(c)) || (g.tier && g.may_offload) || c->slot >= 0);
}

// Everything that may leave now has a price again: whoever was found pinned once may have been let go by the program.
static void refresh_locked() {
  for (Cell* c = g.oldest; c; c = c->next) {
    if (c->gone != PRESENT) continue;
    if (may_leave_locked(c))
      price_locked(c);
    else
      pin_locked(c);
  }
}

static uint8_t action_of(const Cell* c) {
  if (c->wish != KEEP) return c->wish;
  return g.may_evict && can_evict(c) && !g.may_offload ? EVICT : OFFLOAD;
}

// Asks the arena who should leave, checks that they may, and lets them go, all or none: between the choice and the
// check the program may have taken one again. Such a block is pinned and the search runs again. Bounded: a round either
// releases, or pins somebody, or is the last.
static uint64_t release_chosen(uint64_t need, uint64_t request) {
  constexpr int kRounds = 64;
  static thread_local std::vector<mm_victim> victims(256);
  uint64_t released = 0;
  std::unique_lock<std::mutex> lock(g.mu);
  bool refreshed = false;
  for (int round = 0; round < kRounds; ++round) {
    int64_t n;
    while ((n = mm_arena_choose(g.arena, g.search, need, request, g.clock, victims.data(), victims.size())) >
           static_cast<int64_t>(victims.size()))
      victims.resize(static_cast<size_t>(n));
    if (n < 0) {
      // Nothing makes it fit as the prices are. Look at every cell anew, once; then give up what came back early.
      if (!refreshed) {
        refreshed = true;
        refresh_locked();
        continue;
      }
      const uint64_t cancelled = cancel_prefetches(UINT64_MAX, lock);
      released += cancelled;
      if (cancelled > 0) continue;
      return released;
    }
    bool all = true;
    for (int64_t i = 0; i < n; ++i) {
      auto* c = static_cast<Cell*>(victims[static_cast<size_t>(i)].owner);
      if (c->priced_at == victims[static_cast<size_t>(i)].p && c->strong &&
          c->strong->_mutable_data_ptr_no_checks().get() == c->priced_at && may_leave_locked(c))
        continue;
      // Not `pin_locked`: the block may be one that the cell has left.
      const mm_price pinned{victims[static_cast<size_t>(i)].p, c, -1.0, 0.0};
      mm_arena_price(g.arena, &pinned, 1);
      all = false;
    }
    if (!all) {
      // What one holds others are likely to be held with: look at all of them rather than at one window after another.
      if (round == 0 && !refreshed) refresh_locked();
      continue;
    }
    for (int64_t i = 0; i < n; ++i) {
      const mm_victim& victim = victims[static_cast<size_t>(i)];
      auto* c = static_cast<Cell*>(victim.owner);
      // The lock was dropped for the one before: whose block it is tells whether the cell still lives.
      if (i > 0 && mm_arena_owner(g.arena, victim.p) != c) continue;
      if (release_cell_locked(c, action_of(c), lock, false))
        released += victim.bytes;
      else if (mm_arena_owner(g.arena, victim.p) == c)
        pin_locked(c);
    }
    if (n == 0 && released == 0) return 1;  // it fits already: another thread has freed something
    if (released > 0) return released;
  }
  return released;
}

// ---- Python ----

// set_placement(search, remap, apart): search -1: none, by rank; else MM_BY_*.
static PyObject* py_set_placement(PyObject*, PyObject* args) {
  int search, remap, apart;
  if (!PyArg_ParseTuple(args, "iip", &search, &remap, &apart)) return nullptr;
  std::lock_guard<std::mutex> lock(g.mu);
  g.search = search;
  g.remap = remap;
  g.price_per_byte = 1;
  if (g.arena) mm_arena_set_layout(g.arena, remap, apart);
  Py_RETURN_NONE;
}

// price(cells, costs, actions, exponent): what the policies think of each cell: float64 and int8, one entry per cell. A
// cell leaves at cost / staleness^exponent.
static PyObject* py_price(PyObject*, PyObject* args) {
  PyObject* list;
  Py_buffer costs, actions;
  double exponent;
  if (!PyArg_ParseTuple(args, "O!y*y*d", &PyList_Type, &list, &costs, &actions, &exponent)) return nullptr;
  const Py_ssize_t n = PyList_GET_SIZE(list);
  const bool fits = costs.len == n * 8 && actions.len == n;
  if (fits && g.arena) {
    mm_arena_set_staleness_exponent(g.arena, exponent);
    const auto* cost = static_cast<const double*>(costs.buf);
    const auto* action = static_cast<const uint8_t*>(actions.buf);
    double sum = 0, bytes = 0;
    std::lock_guard<std::mutex> lock(g.mu);
    for (Py_ssize_t i = 0; i < n; ++i) {
      auto* c = reinterpret_cast<Cell*>(PyList_GET_ITEM(list, i));
      c->wish = action[i];
      c->price = action[i] == KEEP ? -1 : static_cast<float>(cost[i]);
      if (action[i] == KEEP) continue;
      sum += cost[i];
      bytes += static_cast<double>(c->nbytes);
      price_locked(c);
    }
    if (bytes > 0 && std::isfinite(sum)) g.price_per_byte = sum / bytes;
  }
  PyBuffer_Release(&costs);
  PyBuffer_Release(&actions);
  if (!fits) return PyErr_Format(PyExc_ValueError, "price: one float64 and one int8 for each cell");
  Py_RETURN_NONE;
}

PyMethodDef window_methods[] = {
    {"set_placement", py_set_placement, METH_VARARGS, "set_placement(search, remap, apart)"},
    {"price", py_price, METH_VARARGS, "price(cells, costs, actions, exponent)"},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace memmgr
