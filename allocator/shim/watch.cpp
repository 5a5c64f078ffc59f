// What the telemetry reads: what happened since it was last asked, the cells as they are, the address space.
//
// Nothing here changes a decision or holds a byte: cells are described under `g.mu` and no reference to a storage is
// taken, because a second reference would keep the bytes from leaving.
#include <algorithm>
#include <array>
#include <map>
#include <tuple>

#include "shim.h"

namespace memmgr {

thread_local uint32_t tl_module = 0;       // of the module whose forward runs in this thread (0: unknown)
thread_local const Kind* tl_op = nullptr;  // the op that runs, or whose saved tensor backward asked for last
thread_local uint32_t tl_op_module = 0;    // the module of that op

namespace {

// Which module an op belongs to is learned in a pass with torch's module hooks, and known by the op's place in the pass
// from then on: the hooks cost microseconds a module, this costs nanoseconds an op.
// A program may take several ways through its passes (two optimizers, two lengths); some are remembered.
using Course = std::vector<std::pair<PyObject*, uint32_t>>;  // the op (compared, never followed) and its module
struct Place {
  std::vector<Course> known;
  Course learned;  // this pass, so far
  size_t current = 0, at = 0, next = 0;
};
thread_local Place place;
constexpr size_t kMostCourses = 8, kLongestCourse = 1 << 20, kLookAhead = 16;
std::atomic<bool> learning{false};
std::atomic<uint64_t> astray{0};  // ops that were not the ones learned

bool same_ops(const Course& a, const Course& b, size_t n) {
  for (size_t i = 0; i < n; ++i)
    if (a[i].first != b[i].first) return false;
  return true;
}

struct Sum {
  uint64_t count = 0, bytes = 0, ns = 0;
};
// By what happened, the op that made the bytes, and its module: at most as many entries as the program has such
// triples.
using Key = std::tuple<uint8_t, const Kind*, uint32_t>;
std::map<Key, Sum> happened;
std::mutex happened_mu;  // a leaf, also under g.mu
constexpr size_t kMostKeys = 4096;
uint64_t unlisted = 0;  // events beyond that many entries since the last look

void add(uint8_t what, const Kind* op, uint32_t module, uint64_t bytes, uint64_t ns) {
  std::lock_guard<std::mutex> lock(happened_mu);
  auto it = happened.find({what, op, module});
  if (it == happened.end()) {
    if (happened.size() >= kMostKeys) {
      unlisted++;
      return;
    }
    it = happened.emplace(Key{what, op, module}, Sum{}).first;
  }
  it->second.count++;
  it->second.bytes += bytes;
  it->second.ns += ns;
}

PyObject* op_name(const Kind* kind) {
  if (!kind || !kind->func) Py_RETURN_NONE;
  PyObject* name = PyObject_Str(kind->func);
  if (name) return name;
  PyErr_Clear();
  Py_RETURN_NONE;
}

enum BlockState : int { FREE_ = 0, OTHER = 1, SAVED = 2, HELD = 3, LEAVING = 4, ARRIVING = 5, HOLE = 6, STATES = 7 };

}  // namespace

// An op is about to be recorded.
void note_place(PyObject* func) {
  if (!g.detail.load(std::memory_order_relaxed)) return;
  Place& p = place;
  if (learning.load(std::memory_order_relaxed)) {
    if (p.learned.size() < kLongestCourse) p.learned.emplace_back(func, tl_module);
    return;
  }
  const size_t at = p.at;
  auto fits = [&](const Course& c, size_t i) { return i < c.size() && c[i].first == func; };
  if (p.current < p.known.size() && !fits(p.known[p.current], at)) {
    const Course& was = p.known[p.current];
    for (size_t i = 0; i < p.known.size(); ++i)
      if (fits(p.known[i], at) && was.size() >= at && same_ops(was, p.known[i], at)) {
        p.current = i;
        break;
      }
  }
  if (p.current < p.known.size()) {
    const Course& c = p.known[p.current];
    // An op more or less than was learned: the rest may still be as it was.
    for (size_t i = at; i < at + kLookAhead; ++i)
      if (fits(c, i)) {
        if (i != at) astray.fetch_add(1, std::memory_order_relaxed);
        tl_module = c[i].second;
        p.at = i + 1;
        return;
      }
  }
  tl_module = 0;
  astray.fetch_add(1, std::memory_order_relaxed);
}

void note_end_of_pass() {
  tl_op = nullptr;  // what is waited for from here on is not backward's
  Place& p = place;
  p.at = 0;
  if (p.learned.empty()) return;
  for (p.current = 0; p.current < p.known.size(); ++p.current) {
    const Course& c = p.known[p.current];
    if (c.size() == p.learned.size() && same_ops(c, p.learned, c.size())) break;
  }
  if (p.current == p.known.size()) {
    if (p.known.size() < kMostCourses) p.known.emplace_back();
    p.current = p.known.size() < kMostCourses ? p.known.size() - 1 : p.next++ % kMostCourses;
  }
  p.known[p.current] = std::move(p.learned);
  p.learned.clear();
}

void note_event(Happening what, const Cell* c, uint64_t ns) {
  if (!g.detail.load(std::memory_order_relaxed)) return;
  add(what, c->maker, c->module, static_cast<uint64_t>(c->nbytes), ns);
}

void note_stall(uint64_t bytes, uint64_t ns) {
  if (!g.detail.load(std::memory_order_relaxed)) return;
  add(HAPPENED_STALL, tl_op, tl_op ? tl_op_module : tl_module, bytes, ns);
}

void forked_watch() {
  new (&happened_mu) std::mutex;
  g.detail.store(false);
}

static PyObject* py_set_detail(PyObject*, PyObject* o) {
  const bool on = PyObject_IsTrue(o) == 1;
  g.detail.store(on);
  std::lock_guard<std::mutex> lock(happened_mu);
  happened.clear();
  unlisted = 0;
  Py_RETURN_NONE;
}

static PyObject* py_set_learning(PyObject*, PyObject* o) {
  learning.store(PyObject_IsTrue(o) == 1);
  Py_RETURN_NONE;
}

static PyObject* py_ops_astray(PyObject*, PyObject*) { return PyLong_FromUnsignedLongLong(astray.exchange(0)); }

static PyObject* py_set_module(PyObject*, PyObject* o) {
  tl_module = static_cast<uint32_t>(PyLong_AsUnsignedLongMask(o));
  Py_RETURN_NONE;
}

// note_recompute(recipe, seconds): its op ran again; `bytes` are those of its cells.
static PyObject* py_note_recompute(PyObject*, PyObject* args) {
  PyObject* ro;
  double seconds;
  if (!PyArg_ParseTuple(args, "O!d", &RecipeType, &ro, &seconds)) return nullptr;
  if (!g.detail.load(std::memory_order_relaxed)) Py_RETURN_NONE;
  auto* r = reinterpret_cast<Recipe*>(ro);
  uint64_t bytes = 0;
  for (const Cell* c : r->outputs)
    if (c) bytes += static_cast<uint64_t>(c->nbytes);
  add(HAPPENED_RECOMPUTE, r->kind, r->module, bytes, seconds > 0 ? static_cast<uint64_t>(seconds * 1e9) : 0);
  Py_RETURN_NONE;
}

// drain_events() -> ([(what, op or None, module, count, bytes, seconds)], events that found no entry)
static PyObject* py_drain_events(PyObject*, PyObject*) {
  std::map<Key, Sum> taken;
  unsigned long long rest;
  {
    std::lock_guard<std::mutex> lock(happened_mu);
    taken.swap(happened);
    rest = unlisted;
    unlisted = 0;
  }
  PyObject* list = PyList_New(0);
  for (auto& [key, sum] : taken) {
    PyObject* item =
        list ? Py_BuildValue("(iNIKKd)", static_cast<int>(std::get<0>(key)), op_name(std::get<1>(key)),
                             static_cast<unsigned>(std::get<2>(key)), static_cast<unsigned long long>(sum.count),
                             static_cast<unsigned long long>(sum.bytes), static_cast<double>(sum.ns) * 1e-9)
             : nullptr;
    if (!item || PyList_Append(list, item) < 0) Py_CLEAR(list);
    Py_XDECREF(item);
    if (!list) return nullptr;
  }
  return Py_BuildValue("(NK)", list, rest);
}

// watch_cells(limit) -> ([(bytes, gone, has a copy, the program holds it, handles, seconds of its op, age in seconds of
// virtual time, can be recomputed, op or None, module, arriving)] largest first,
// {module: (present bytes, of these held by the program, gone bytes)})
static PyObject* py_watch_cells(PyObject*, PyObject* o) {
  const long limit = PyLong_AsLong(o);
  if (limit < 0) return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_ValueError, "a negative limit");
  struct Row {
    int64_t bytes;
    int gone, handles;
    bool copy, held, recomputable, arriving;
    double cost, age;
    const Kind* op;
    uint32_t module;
  };
  struct Share {
    uint64_t present = 0, held = 0, gone = 0;
  };
  std::vector<Row> rows;
  std::map<uint32_t, Share> modules;
  {
    std::lock_guard<std::mutex> lock(g.mu);
    for (const Cell* c = g.oldest; c; c = c->next) {
      const bool present = c->gone == PRESENT;
      const bool held = present && c->strong && c->strong.use_count() > 1;
      Share& share = modules[c->module];
      const auto n = static_cast<uint64_t>(c->nbytes);
      (present ? share.present : share.gone) += n;
      if (held) share.held += n;
      // The GIL is held, so the recipe is not going away.
      const bool can = c->recipe && c->recipe->ok && !c->exposed && c->recipe->kind &&
                       c->recipe->kind->trust.load(std::memory_order_relaxed) == TRUST_YES;
      rows.push_back({c->nbytes, c->gone, c->handles, c->slot >= 0, held, can, c->incoming.get() != nullptr, c->cost,
                      g.clock - c->last_access, c->maker, c->module});
    }
  }
  const size_t n = std::min(rows.size(), static_cast<size_t>(limit));
  std::partial_sort(rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(n), rows.end(),
                    [](const Row& a, const Row& b) { return a.bytes > b.bytes; });
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(n));
  PyObject* by_module = PyDict_New();
  for (size_t i = 0; list && by_module && i < n; ++i) {
    const Row& r = rows[i];
    PyObject* item = Py_BuildValue("(LiNNiddNNIN)", static_cast<long long>(r.bytes), r.gone, PyBool_FromLong(r.copy),
                                   PyBool_FromLong(r.held), r.handles, r.cost, r.age, PyBool_FromLong(r.recomputable),
                                   op_name(r.op), static_cast<unsigned>(r.module), PyBool_FromLong(r.arriving));
    if (!item) {
      Py_CLEAR(list);
      break;
    }
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), item);
  }
  for (auto& [module, share] : modules) {
    if (!list || !by_module) break;
    PyObject* key = PyLong_FromUnsignedLong(module);
    PyObject* value =
        Py_BuildValue("(KKK)", static_cast<unsigned long long>(share.present),
                      static_cast<unsigned long long>(share.held), static_cast<unsigned long long>(share.gone));
    if (!key || !value || PyDict_SetItem(by_module, key, value) < 0) Py_CLEAR(list);
    Py_XDECREF(key);
    Py_XDECREF(value);
  }
  if (!list || !by_module) {
    Py_XDECREF(list);
    Py_XDECREF(by_module);
    return nullptr;
  }
  return Py_BuildValue("(NN)", list, by_module);
}

namespace {

struct Strip {
  const char* base;
  std::vector<std::pair<uint64_t, int>> marks;  // offset of a block's start, what lies there
  struct Piece {
    uint64_t offset, bytes;
    int state;
  };
  std::vector<Piece> pieces;
};

int strip_piece(void* user, uint64_t offset, uint64_t bytes, int state) {
  auto* strip = static_cast<Strip*>(user);
  int what = state == 1 ? OTHER : state == 0 ? FREE_ : HOLE;
  if (state == 1) {
    auto it = std::lower_bound(strip->marks.begin(), strip->marks.end(), std::make_pair(offset, 0));
    if (it != strip->marks.end() && it->first < offset + bytes) what = it->second;
  }
  strip->pieces.push_back({offset, bytes, what});
  return 0;
}

}  // namespace

// memory_map(columns) -> (bytes of address space shown, [bytes per state] * columns): states are free, other, saved and
// may leave, saved and held by the program, leaving (ranked or being written), arriving, hole (no memory behind it).
// Shown is the range up to its last block that has memory; the part for small blocks follows at once.
static PyObject* py_memory_map(PyObject*, PyObject* o) {
  const long columns = PyLong_AsLong(o);
  if (columns < 1 || columns > 4096) return PyErr_Format(PyExc_ValueError, "1 to 4096 columns");
  Strip strip{};
  if (g.arena) {
    strip.base = static_cast<const char*>(mm_arena_base(g.arena));
    {
      std::lock_guard<std::mutex> lock(g.mu);
      auto mark = [&](const void* p, int what) {
        if (p && mm_arena_owns(g.arena, p))
          strip.marks.emplace_back(static_cast<uint64_t>(static_cast<const char*>(p) - strip.base), what);
      };
      for (const Cell* c = g.oldest; c; c = c->next) {
        if (c->incoming.get()) mark(c->incoming.get(), ARRIVING);
        if (c->gone != PRESENT || !c->strong) continue;
        const int what = c->strong.use_count() > 1 ? HELD : c->armed != KEEP || c->slot >= 0 ? LEAVING : SAVED;
        mark(const_cast<c10::StorageImpl*>(c->strong.get())->_mutable_data_ptr_no_checks().get(), what);
      }
    }
    std::sort(strip.marks.begin(), strip.marks.end());
    mm_arena_walk(g.arena, &strip_piece, &strip);
  }
  // Addresses are plenty: long stretches without memory say nothing and would make the rest invisible.
  uint64_t live = 0, span = 0;
  for (const auto& piece : strip.pieces)
    if (piece.state != HOLE) live += piece.bytes;
  for (auto& piece : strip.pieces) {
    if (piece.state == HOLE) piece.bytes = std::min(piece.bytes, live / 64);
    span += piece.bytes;
  }
  while (!strip.pieces.empty() && strip.pieces.back().state == HOLE) {
    span -= strip.pieces.back().bytes;
    strip.pieces.pop_back();
  }
  std::vector<std::array<double, STATES>> sums(static_cast<size_t>(columns));
  const double width = std::max(1.0, static_cast<double>(span) / static_cast<double>(columns));
  double at = 0;
  for (const auto& piece : strip.pieces) {
    const double end = at + static_cast<double>(piece.bytes);
    for (auto i = static_cast<size_t>(at / width); i < sums.size() && static_cast<double>(i) * width < end; ++i) {
      const double from = std::max(at, static_cast<double>(i) * width);
      const double to = std::min(end, static_cast<double>(i + 1) * width);
      if (to > from) sums[i][static_cast<size_t>(piece.state)] += to - from;
    }
    at = end;
  }
  PyObject* list = PyList_New(0);
  for (const auto& sum : sums) {
    PyObject* item = list ? Py_BuildValue("(LLLLLLL)", static_cast<long long>(sum[0]), static_cast<long long>(sum[1]),
                                          static_cast<long long>(sum[2]), static_cast<long long>(sum[3]),
                                          static_cast<long long>(sum[4]), static_cast<long long>(sum[5]),
                                          static_cast<long long>(sum[6]))
                          : nullptr;
    if (!item || PyList_Append(list, item) < 0) Py_CLEAR(list);
    Py_XDECREF(item);
    if (!list) return nullptr;
  }
  return Py_BuildValue("(KN)", static_cast<unsigned long long>(span), list);
}

PyMethodDef watch_methods[] = {
    {"set_detail", py_set_detail, METH_O, "whether what happens is noted by op and module"},
    {"set_module", py_set_module, METH_O, "number of the module whose forward runs in this thread"},
    {"set_learning", py_set_learning, METH_O, "whether set_module is called for every module"},
    {"ops_astray", py_ops_astray, METH_NOARGS, "ops since the last call whose module is not known"},
    {"note_recompute", py_note_recompute, METH_VARARGS, "note_recompute(recipe, seconds)"},
    {"drain_events", py_drain_events, METH_NOARGS, "what happened since the last call"},
    {"watch_cells", py_watch_cells, METH_O, "watch_cells(limit): the largest, and sums by module"},
    {"memory_map", py_memory_map, METH_O, "memory_map(columns)"},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace memmgr
