// Plans, as malloc and the hooks follow them (design §5). A plan says of each cell that a pass saves, in the order of
// saving, whether it stays, is dropped or is written out. It supplies decisions, never recipes.
//
// A pass follows a plan while what it saves has the plan's sizes. The first that has not makes it look for another plan
// that began the same way; without one, the policies rank and choose as they do without plans, from that moment on. So
// does a pass whose plan leaves malloc without enough to take.
//
// Guarded by the GIL, but for what is said to be atomic. A cell is named in `waiting` only while it has handles.
#include <array>

#include "shim.h"

namespace memmgr {

namespace {

// An absence that begins in backward: a cell's second, or its first.
struct Again {
  uint32_t save;
  uint8_t action;  // Action
  int32_t burst;   // in which it returns; -1: none
};

struct LivePlan {
  int id;
  std::vector<int64_t> sizes;                   // bytes of what is saved, in the order of the first save in the pass
  std::vector<uint8_t> actions;                 // Action
  std::vector<uint64_t> prefixes;               // hash of the sizes up to and including this one
  std::vector<std::vector<uint32_t>> triggers;  // by the save that is used in backward: what is read back from then on
  std::vector<int32_t> burst;                   // by save: the number of the burst in which its op runs again; -1: none
  std::vector<std::vector<uint32_t>> bursts;    // by number: its saves
  std::vector<std::array<int64_t, 3>> carried;  // (burst, a later one, bytes): made in the one, kept for the other
  std::vector<std::vector<Again>> again;        // by the save that is used in backward: who may go from then on
  std::vector<bool> in_backward;                // by save: is it among those
};

struct ThisPass {
  uint64_t hash = 0;
  std::vector<int64_t> sizes;                // of this pass, for whoever makes a plan of it
  const LivePlan* plan = nullptr;            // that it follows
  int64_t left_at = -1;                      // the save at which it left the last plan that it followed; -1: it did not
  std::unordered_map<uint32_t, Cell*> away;  // by save: planned to leave; borrowed, while they have handles
  std::vector<uint32_t> owed;                // triggered, and there was no room so far
  std::vector<uint32_t> late;                // was asked for before it was there
  std::vector<Cell*> waiting;                // to be let go, but the program still has them; references of ours
  std::vector<Again> again;                  // may go, and is not back yet
  std::unordered_map<uint32_t, int32_t> burst;  // by save: of what may go in backward, the burst of its next return
};

std::vector<LivePlan*> plans;  // the one that was followed last comes first
ThisPass pass;

constexpr size_t kMostSaves = size_t{1} << 20;  // of a pass: what is longer is no pass, and no plan is made of it

bool begins_like(const LivePlan* plan, size_t saves, uint64_t hash) {
  return saves <= plan->sizes.size() && saves > 0 && plan->prefixes[saves - 1] == hash;
}

void forget_waiting() {
  std::vector<Cell*> waiting;
  waiting.swap(pass.waiting);
  pass.away.clear();
  pass.owed.clear();
  pass.again.clear();
  for (Cell* c : waiting) deferred_decref(reinterpret_cast<PyObject*>(c));
}

int32_t burst_of(size_t save) {
  auto it = pass.burst.find(static_cast<uint32_t>(save));
  if (it != pass.burst.end()) return it->second;
  return save < pass.plan->burst.size() ? pass.plan->burst[save] : -1;
}

// What is there and may go in backward waits, like what was saved, until the program has let go of it.
void wait_again() {
  size_t kept = 0;
  std::lock_guard<std::mutex> lock(g.mu);
  for (const Again& next : pass.again) {
    auto it = pass.away.find(next.save);
    if (it == pass.away.end()) continue;  // nobody asks for it any more
    Cell* c = it->second;
    if (c->gone != PRESENT) {
      pass.again[kept++] = next;
      continue;
    }
    pass.burst[next.save] = next.burst;
    c->wish = next.action;
    Py_INCREF(c);
    pass.waiting.push_back(c);
  }
  pass.again.resize(kept);
}

// Who may go by the plan goes onto the list that malloc takes from; what is to be written out is written from now on.
bool arm_planned(Cell* c, uint8_t action) {
  std::lock_guard<std::mutex> lock(g.mu);
  if (!c->listed || c->armed != KEEP || c->gone != PRESENT) return true;
  if (!ours_alone_locked(c)) return false;
  if (action == OFFLOAD) write_back_locked(c);
  arm_locked(c, action, true);
  return true;
}

}  // namespace

// Is a plan being followed, so that nobody needs to search?
bool plan_leads() { return pass.plan && !g.plan_short.load(std::memory_order_relaxed); }

// Does it say when what was written out comes back?
bool plan_brings_back() { return plan_leads() && !pass.plan->triggers.empty(); }

// Between two ops, the program's or a replay's: more has been let go of.
void plan_settle() {
  if (!pass.again.empty()) wait_again();
  if (pass.waiting.empty()) return;
  // The end of a cell may run Python, and so another thread that saves: the list is not touched meanwhile.
  std::vector<Cell*> looked_at, kept;
  looked_at.swap(pass.waiting);
  for (Cell* c : looked_at) {
    if (c->handles > 0 && !arm_planned(c, c->wish))
      kept.push_back(c);
    else
      deferred_decref(reinterpret_cast<PyObject*>(c));
  }
  pass.waiting.insert(pass.waiting.begin(), kept.begin(), kept.end());
}

// The pass saves this cell for the first time; its `save_index` says when.
void plan_saved(Cell* c) {
  if (!g.active) return;
  const size_t k = c->save_index;
  if (k >= kMostSaves) return;  // forward passes that no backward ends
  pass.hash = mixed(pass.hash, static_cast<uint64_t>(c->nbytes));
  pass.sizes.push_back(c->nbytes);
  if (plans.empty()) return;
  if (k == 0) pass.plan = plans.front();
  if (pass.plan && (k >= pass.plan->sizes.size() || pass.plan->sizes[k] != c->nbytes)) {
    pass.left_at = static_cast<int64_t>(k);
    pass.plan = nullptr;
    for (const LivePlan* other : plans)
      if (begins_like(other, k + 1, pass.hash)) {
        pass.plan = other;
        break;
      }
  }
  if (!pass.plan) return;
  const uint8_t action = pass.plan->actions[k];
  c->wish = action;
  if (!plan_leads()) return;
  if (action != KEEP || (k < pass.plan->in_backward.size() && pass.plan->in_backward[k]))
    pass.away[static_cast<uint32_t>(k)] = c;
  if (action == KEEP) return;
  Py_INCREF(c);
  pass.waiting.push_back(c);
}

// Its last handle has gone: nobody asks for this cell any more.
void plan_let_go(const Cell* c) {
  if (pass.away.empty()) return;
  auto it = pass.away.find(c->save_index);
  if (it != pass.away.end() && it->second == c) pass.away.erase(it);
}

// Backward asks for a cell: what the plan brings back from here on begins to come (Capuchin's in-trigger).
void plan_unpacked(const Cell* c) {
  if (!pass.plan) return;
  const bool own = c->saved_in == g.pass;
  if (own && c->save_index < pass.plan->again.size())
    for (const Again& next : pass.plan->again[c->save_index]) pass.again.push_back(next);
  if (pass.plan->triggers.empty()) return;
  if (own && c->save_index < pass.plan->triggers.size())
    for (const uint32_t k : pass.plan->triggers[c->save_index]) pass.owed.push_back(k);
  if (pass.owed.empty()) return;
  // The GIL is dropped below, and another thread may come by: what is being asked for belongs to this call.
  std::vector<uint32_t> asked;
  asked.swap(pass.owed);
  const uint32_t number = g.pass;
  for (size_t i = 0; i < asked.size() && number == g.pass; ++i) {
    auto it = pass.away.find(asked[i]);
    if (it == pass.away.end()) continue;
    Cell* wanted = it->second;
    Py_INCREF(wanted);
    const int begun = begin_reload(wanted, 0);
    deferred_decref(reinterpret_cast<PyObject*>(wanted));
    if (begun == 0) {  // no room: at the next use
      if (number == g.pass)
        pass.owed.insert(pass.owed.begin(), asked.begin() + static_cast<std::ptrdiff_t>(i), asked.end());
      break;
    }
  }
}

// Somebody waits for bytes of this cell.
void plan_late(const Cell* c) {
  if (!pass.plan || c->saved_in != g.pass || c->wish != OFFLOAD) return;
  if (pass.away.count(c->save_index)) pass.late.push_back(c->save_index);
}

// ---- Python ----

// add_plan(id, sizes, actions, triggers, bursts, carried, again): int64, uint8 and (bursts) int32, one entry for each
// save of the pass; int32 pairs (used, k): with the first use in backward of save `used`, save k begins to come back;
// saves with one burst >= 0 are made again in one go; int64 triples (burst, later burst, bytes): so much is kept from
// one to the other; int32 quadruples (used, k, action, burst): from the use of save `used` on, save k may go when it is
// there, and returns with that burst.
static PyObject* py_add_plan(PyObject*, PyObject* args) {
  int id;
  Py_buffer sizes, actions, triggers, bursts, carried, again;
  if (!PyArg_ParseTuple(args, "iy*y*y*y*y*y*", &id, &sizes, &actions, &triggers, &bursts, &carried, &again))
    return nullptr;
  const auto n = static_cast<size_t>(actions.len);
  const bool fits = static_cast<size_t>(sizes.len) == 8 * n && static_cast<size_t>(bursts.len) == 4 * n && n > 0;
  if (fits) {
    auto* plan = new LivePlan{id, {}, {}, {}, {}, {}, {}, {}, {}, {}};
    const auto* size = static_cast<const int64_t*>(sizes.buf);
    plan->sizes.assign(size, size + n);
    plan->actions.assign(static_cast<const uint8_t*>(actions.buf), static_cast<const uint8_t*>(actions.buf) + n);
    uint64_t hash = 0;
    for (int64_t s : plan->sizes) plan->prefixes.push_back(hash = mixed(hash, static_cast<uint64_t>(s)));
    const auto* pairs = static_cast<const int32_t*>(triggers.buf);
    const auto count = static_cast<size_t>(triggers.len) / 8;
    if (count > 0) plan->triggers.resize(n);
    for (size_t i = 0; i < count; ++i) {
      const auto used = static_cast<size_t>(pairs[2 * i]);
      if (used < n) plan->triggers[used].push_back(static_cast<uint32_t>(pairs[2 * i + 1]));
    }
    const auto* burst = static_cast<const int32_t*>(bursts.buf);
    plan->burst.assign(burst, burst + n);
    const auto* next = static_cast<const int32_t*>(again.buf);
    const auto most = n + static_cast<size_t>(again.len) / 16;  // bursts
    const auto joins = [plan, most](size_t k, int32_t number) {
      const auto at = static_cast<size_t>(number);
      if (number < 0 || at >= most) return;
      if (plan->bursts.size() <= at) plan->bursts.resize(at + 1);
      plan->bursts[at].push_back(static_cast<uint32_t>(k));
    };
    for (size_t k = 0; k < n; ++k) joins(k, burst[k]);
    for (size_t i = 0; i + 3 < static_cast<size_t>(again.len) / 4; i += 4) {
      const auto used = static_cast<size_t>(next[i]), k = static_cast<size_t>(next[i + 1]);
      if (used >= n || k >= n) continue;
      if (plan->again.empty()) {
        plan->again.resize(n);
        plan->in_backward.resize(n);
      }
      plan->in_backward[k] = true;
      plan->again[used].push_back({static_cast<uint32_t>(k), static_cast<uint8_t>(next[i + 2]), next[i + 3]});
      joins(k, next[i + 3]);
    }
    const auto* triples = static_cast<const int64_t*>(carried.buf);
    for (size_t i = 0; i + 2 < static_cast<size_t>(carried.len) / 8; i += 3)
      plan->carried.push_back({triples[i], triples[i + 1], triples[i + 2]});
    plans.insert(plans.begin(), plan);
  }
  PyBuffer_Release(&again);
  PyBuffer_Release(&carried);
  PyBuffer_Release(&bursts);
  PyBuffer_Release(&triggers);
  PyBuffer_Release(&sizes);
  PyBuffer_Release(&actions);
  if (!fits) return PyErr_Format(PyExc_ValueError, "add_plan: one int64, one uint8 and one int32 for each save");
  Py_RETURN_NONE;
}

// The saves of a burst that are still to be made again, but for `c`: new references.
static std::vector<PyObject*> gone_of(int64_t burst, const Cell* c) {
  std::vector<PyObject*> out;
  if (burst < 0 || static_cast<size_t>(burst) >= pass.plan->bursts.size()) return out;
  for (const uint32_t k : pass.plan->bursts[static_cast<size_t>(burst)]) {
    auto it = pass.away.find(k);
    if (it == pass.away.end() || it->second == c || it->second->gone != EVICTED || burst_of(k) != burst) continue;
    out.push_back(Py_NewRef(reinterpret_cast<PyObject*>(it->second)));
  }
  return out;
}

// A list of them; takes the references.
static PyObject* list_of(const std::vector<PyObject*>& cells) {
  PyObject* out = PyList_New(static_cast<Py_ssize_t>(cells.size()));
  for (size_t i = 0; i < cells.size(); ++i) {
    if (out)
      PyList_SET_ITEM(out, static_cast<Py_ssize_t>(i), cells[i]);
    else
      Py_DECREF(cells[i]);
  }
  return out;
}

// plan_together(cell) -> None if no plan is followed, or (number of its burst or -1, the others of it that are gone,
// [(number of a later one, its saves that are gone, bytes that are kept for it)]).
static PyObject* py_plan_together(PyObject*, PyObject* o) {
  if (Py_TYPE(o) != &CellType) return PyErr_Format(PyExc_TypeError, "plan_together: a cell");
  const auto* c = reinterpret_cast<Cell*>(o);
  if (!plan_leads()) Py_RETURN_NONE;
  auto own = c->saved_in == g.pass ? pass.away.find(c->save_index) : pass.away.end();
  const int32_t number = own != pass.away.end() && own->second == c ? burst_of(c->save_index) : -1;
  // Making Python objects may collect garbage, and so end handles, or the pass: all is looked up before.
  struct Later {
    int64_t number, bytes;
    std::vector<PyObject*> gone;
  };
  std::vector<Later> found;
  for (const auto& [from, to, bytes] : pass.plan->carried)
    if (from == number) found.push_back({to, bytes, gone_of(to, c)});
  PyObject* others = list_of(gone_of(number, c));
  PyObject* later = PyList_New(0);
  bool ok = others && later;
  for (const Later& l : found) {
    PyObject* gone = list_of(l.gone);
    PyObject* entry =
        gone ? Py_BuildValue("(LNL)", static_cast<long long>(l.number), gone, static_cast<long long>(l.bytes))
             : nullptr;
    ok = ok && entry && PyList_Append(later, entry) == 0;
    Py_XDECREF(entry);
  }
  if (ok) return Py_BuildValue("(iNN)", number, others, later);
  Py_XDECREF(others);
  Py_XDECREF(later);
  return nullptr;
}

// drop_plans(id): that one; negative: all of them.
static PyObject* py_drop_plans(PyObject*, PyObject* o) {
  const long id = PyLong_AsLong(o);
  if (id == -1 && PyErr_Occurred()) return nullptr;
  for (size_t i = 0; i < plans.size();) {
    if (id >= 0 && plans[i]->id != id) {
      ++i;
      continue;
    }
    if (pass.plan == plans[i]) pass.plan = nullptr;
    delete plans[i];
    plans.erase(plans.begin() + static_cast<std::ptrdiff_t>(i));
  }
  if (id < 0) {
    forget_waiting();
    pass = ThisPass();
    g.plan_short = false;
  }
  Py_RETURN_NONE;
}

// begin_pass() -> (saves, hash, id of the plan that was followed to the end or -1, save at which one was left or -1,
// whether malloc found too little, sizes as int64, saves that were waited for) of the pass that ends here.
static PyObject* py_begin_pass(PyObject*, PyObject*) {
  // A pass that ends before its plan does has not followed it.
  const bool whole = pass.plan && pass.sizes.size() == pass.plan->sizes.size();
  if (pass.plan && !whole && pass.left_at < 0) pass.left_at = static_cast<int64_t>(pass.sizes.size());
  const int id = whole ? pass.plan->id : -1;
  if (whole)
    for (size_t i = 1; i < plans.size(); ++i)
      if (plans[i] == pass.plan) {
        plans.erase(plans.begin() + static_cast<std::ptrdiff_t>(i));
        plans.insert(plans.begin(), const_cast<LivePlan*>(pass.plan));
        break;
      }
  PyObject* late = PyList_New(0);
  for (const uint32_t k : pass.late) {
    PyObject* index = PyLong_FromUnsignedLong(k);
    PyList_Append(late, index);
    Py_XDECREF(index);
  }
  PyObject* out = Py_BuildValue("(nKiLNNN)", static_cast<Py_ssize_t>(pass.sizes.size()), (unsigned long long)pass.hash,
                                id, (long long)pass.left_at, PyBool_FromLong(g.plan_short.load()),
                                PyBytes_FromStringAndSize(reinterpret_cast<const char*>(pass.sizes.data()),
                                                          static_cast<Py_ssize_t>(8 * pass.sizes.size())),
                                late);
  forget_waiting();
  {
    // Nothing may leave any more of what was armed: passes that follow a plan never come to the list's end by
    // themselves.
    std::lock_guard<std::mutex> lock(g.mu);
    if (g.armed_bytes == 0) clear_armed_locked();
  }
  pass = ThisPass();
  g.pass++;
  g.saved_in_pass = 0;
  g.plan_short = false;
  return out;
}

static PyObject* py_plan_brings_back(PyObject*, PyObject*) { return PyBool_FromLong(plan_brings_back()); }

static PyObject* py_plan_settle(PyObject*, PyObject*) {
  if (plan_leads()) plan_settle();
  Py_RETURN_NONE;
}

static PyObject* py_plan_leads(PyObject*, PyObject*) { return PyBool_FromLong(plan_leads()); }

PyMethodDef plan_methods[] = {
    {"add_plan", py_add_plan, METH_VARARGS, "add_plan(id, sizes, actions, triggers, bursts, carried, again)"},
    {"drop_plans", py_drop_plans, METH_O, "drop_plans(id): that one; negative: all"},
    {"begin_pass", py_begin_pass, METH_NOARGS, "-> how the pass that ends here followed its plan"},
    {"plan_together", py_plan_together, METH_O, "-> what the plan makes again in one go with this cell"},
    {"plan_settle", py_plan_settle, METH_NOARGS, "what it lets go and nobody uses any more may go"},
    {"plan_leads", py_plan_leads, METH_NOARGS, "whether a plan is being followed"},
    {"plan_brings_back", py_plan_brings_back, METH_NOARGS, "whether it says when what was written out comes back"},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace memmgr
