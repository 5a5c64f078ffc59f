// A measured pass as it happens: which blocks live and who holds them, what autograd saves and asks back, what an op
// takes and needs beyond its outputs. Python (memmgr/_trace.py) reads it when the pass is over: what runs beside the
// ops makes them slower, by caches that it leaves cold, and no clock of ours sees that.
//
// A block is a storage, or the cell that stands for its bytes while they are gone: bytes that are made again come back
// in another storage. Blocks are numbered as they are first seen. They are watched through weak pointers, so watching
// keeps no bytes; a storage's address cannot be used again as long as a weak pointer to it exists, so it is a good key.
#include "shim.h"

namespace memmgr {

namespace {

struct Block {
  WeakStorage weak{StorageRef()};
  c10::StorageImpl* key = nullptr;
  c10::SmallVector<Cell*, 2> cells;  // saved ones; references that are ours, given back with their last handle
  uint64_t bytes = 0;
  bool alone = false;
  bool asked = false;  // backward has it, and has not let go of it yet
};

struct Save {
  long long block, index;
};

struct Fresh {
  long long block;
  uint64_t bytes;
  bool leaf;  // a tensor that wants a gradient and no op made: a parameter
};

// What happened since the op before, and what this one did. Lists lie one after the other in `Tracing::numbers`.
struct Event {
  enum List : uint8_t { RELEASED, ALONE, ENDED, SAVES, USES, INPUTS, FRESH, OUTPUTS, MADE, AGAIN, LISTS };
  PyObject* func = nullptr;   // null: the end of the pass. Its kind keeps it alive
  PyObject* extra = nullptr;  // what Python says of an op that writes; a reference of ours
  size_t first = 0;           // where the lists up to FRESH begin
  size_t made = 0;            // and those after it
  uint32_t count[LISTS] = {};
  uint64_t need = 0, live = 0, peak = 0;  // bytes
  uint64_t between_ns = 0, wall_ns = 0, took_ns = 0;
  bool took = false;
};

enum Noting : uint8_t { UNNOTED = 0, NOTED = 1, ASKED = 2 };

struct Tracing {
  PyObject* on_kind = nullptr;   // (func) -> Noting
  PyObject* on_write = nullptr;  // (func, args, kwargs, whether anything was saved) -> what is kept with the event
  size_t most_ops = 0;
  uint64_t pass = 0;                             // its number
  bool broken = false;                           // it failed, or had too many ops
  std::unordered_map<PyObject*, uint8_t> kinds;  // references that are ours
  std::vector<Event> events;
  std::vector<long long> numbers;
  bool any_saved = false;
  uint64_t left_ns = 0, elsewhere_ns = 0;  // when the last op had been noted, and what had been spent elsewhere by then
  uint64_t replayed_ns = 0, spent_ns = 0;
  pthread_t thread{};
  std::vector<Block> blocks;
  std::vector<long long> live;
  std::unordered_map<c10::StorageImpl*, long long> by_storage;
  std::unordered_map<Cell*, long long> by_cell;
  std::vector<Fresh> fresh;
  std::vector<Save> saves;
  std::vector<long long> uses;
  std::vector<long long> ended;
  uint64_t live_bytes = 0;
  uint64_t took_ns = 0;
  bool took = false;
  uint64_t incoming = 0;  // prefetched bytes when the op began: they are counted twice while they arrive
};

Tracing tr;

// The storage that the block's bytes are in now.
void move_to(Block& b, long long id, const StorageRef& s) {
  if (b.key == s.get()) return;
  auto it = tr.by_storage.find(b.key);
  if (it != tr.by_storage.end() && it->second == id) tr.by_storage.erase(it);
  b.key = s.get();
  b.weak = WeakStorage(s);
  tr.by_storage[b.key] = id;
}

long long new_block(const StorageRef& s, uint64_t bytes, bool leaf) {
  const auto id = static_cast<long long>(tr.blocks.size());
  tr.blocks.emplace_back();
  Block& b = tr.blocks.back();
  b.bytes = bytes;
  if (s) move_to(b, id, s);
  tr.live.push_back(id);
  tr.live_bytes += bytes;
  tr.fresh.push_back({id, bytes, leaf});
  return id;
}

// As the budget counts it.
uint64_t resident_bytes(const c10::StorageImpl* s) {
  const void* p = const_cast<c10::StorageImpl*>(s)->_mutable_data_ptr_no_checks().get();
  const uint64_t block = g.arena && p && mm_arena_owns(g.arena, p) ? mm_arena_block_bytes(g.arena, p) : 0;
  return block ? block : s->nbytes();
}

// The tensor's block; -1 for what has no plain storage.
long long watch(c10::TensorImpl* t) {
  if (!is_plain(t)) return -1;
  c10::StorageImpl* s = t->unsafe_storage().unsafeGetStorageImpl();
  auto known = tr.by_storage.find(s);
  if (known != tr.by_storage.end()) return known->second;
  auto entry = g.table.find(s);
  if (entry != g.table.end()) {
    auto saved = tr.by_cell.find(entry->second);
    if (saved != tr.by_cell.end()) {
      move_to(tr.blocks[static_cast<size_t>(saved->second)], saved->second, storage_of(t));
      return saved->second;
    }
  }
  const auto* meta = t->autograd_meta();
  const bool leaf = meta && t->requires_grad() && !t->is_inference();
  return new_block(storage_of(t), resident_bytes(s), leaf);
}

void watch_all(PyObject* o, std::vector<long long>& ids) {
  if (!o || o == Py_None) return;
  if (c10::TensorImpl* t = impl_of(o)) {
    const long long id = watch(t);
    if (id >= 0) ids.push_back(id);
  } else if (PyTuple_Check(o) || PyList_Check(o)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(o); ++i) watch_all(PySequence_Fast_GET_ITEM(o, i), ids);
  } else if (PyDict_Check(o)) {
    PyObject *key, *v;
    Py_ssize_t at = 0;
    while (PyDict_Next(o, &at, &key, &v)) watch_all(v, ids);
  }
}

void keep_cell(long long id, Cell* c) {
  Block& b = tr.blocks[static_cast<size_t>(id)];
  for (Cell* known : b.cells)
    if (known == c) return;
  Py_INCREF(c);
  b.cells.push_back(c);
  b.alone = false;
  tr.by_cell[c] = id;
}

// Only recipes hold it: the program has let go of it.
bool ours_only(const Block& b) {
  auto it = g.table.find(b.key);
  return it != g.table.end() && it->second->strong.get() == b.key;
}

// Looks at every block: `released` has those that the program has let go of, `alone` those that only autograd holds for
// the first time, `ended` those that a node of backward had asked for and that nobody uses any more.
void poll(std::vector<long long>& released, std::vector<long long>& alone, std::vector<long long>& ended) {
  std::vector<Cell*> done;
  size_t kept = 0;
  {
    std::lock_guard<std::mutex> lock(g.mu);
    for (const long long id : tr.live) {
      Block& b = tr.blocks[static_cast<size_t>(id)];
      bool saved = false, free_to_go = true;
      for (size_t i = 0; i < b.cells.size();) {
        Cell* c = b.cells[i];
        if (c->handles > 0) {
          saved = true;
          free_to_go &= !c->strong || c->strong.use_count() == 1;
          ++i;
          continue;
        }
        if (StorageRef s = c->weak.lock()) move_to(b, id, s);  // its own reference is counted by nobody below
        tr.by_cell.erase(c);
        done.push_back(c);
        b.cells.erase(b.cells.begin() + static_cast<std::ptrdiff_t>(i));
      }
      const size_t count = saved ? 2 : b.weak.use_count();
      const bool gone = count == 0 || (count == 1 && ours_only(b));
      if (b.asked && (gone || (saved && free_to_go))) {
        b.asked = false;
        ended.push_back(id);
      }
      if (gone) {
        released.push_back(id);
        tr.live_bytes -= b.bytes;
        auto it = tr.by_storage.find(b.key);
        if (it != tr.by_storage.end() && it->second == id) tr.by_storage.erase(it);
        b.weak = WeakStorage(StorageRef());
        b.key = nullptr;
        continue;
      }
      if (saved && free_to_go && !b.alone) {
        b.alone = true;
        alone.push_back(id);
      }
      tr.live[kept++] = id;
    }
    tr.live.resize(kept);
  }
  for (Cell* c : done) deferred_decref(reinterpret_cast<PyObject*>(c));
}

void note(Event& e, Event::List which, const std::vector<long long>& ids) {
  tr.numbers.insert(tr.numbers.end(), ids.begin(), ids.end());
  e.count[which] = static_cast<uint32_t>(ids.size());
}

void note_fresh(Event& e, Event::List which) {
  for (const Fresh& f : tr.fresh)
    tr.numbers.insert(tr.numbers.end(), {f.block, static_cast<long long>(f.bytes), f.leaf ? 1 : 0});
  e.count[which] = static_cast<uint32_t>(3 * tr.fresh.size());
  tr.fresh.clear();
}

void note_saves(Event& e) {
  for (const Save& s : tr.saves) tr.numbers.insert(tr.numbers.end(), {s.block, s.index});
  e.count[Event::SAVES] = static_cast<uint32_t>(2 * tr.saves.size());
  tr.saves.clear();
}

// Of each list of an event, in groups of `width`: a tuple of numbers, or of tuples.
PyObject* listed(const long long* from, size_t n, size_t width) {
  PyObject* t = PyTuple_New(static_cast<Py_ssize_t>(n / width));
  for (size_t i = 0; t && i < n / width; ++i) {
    const long long* at = from + i * width;
    PyObject* item = width == 1   ? PyLong_FromLongLong(at[0])
                     : width == 2 ? Py_BuildValue("LL", at[0], at[1])
                                  : Py_BuildValue("LLN", at[0], at[1], PyBool_FromLong(at[2] != 0));
    if (!item) {
      Py_DECREF(t);
      return nullptr;
    }
    PyTuple_SET_ITEM(t, static_cast<Py_ssize_t>(i), item);
  }
  return t;
}

// (func, lists in their order, need, live, between, extra, peak, wall, seconds or -1); bytes and seconds.
PyObject* told(const Event& e, const std::vector<long long>& numbers) {
  PyObject* lists = PyTuple_New(Event::LISTS);
  const long long* from = numbers.data() + e.first;
  for (size_t k = 0; lists && k < Event::LISTS; ++k) {
    if (k == Event::OUTPUTS) from = numbers.data() + e.made;
    const size_t width = k == Event::SAVES ? 2 : k == Event::FRESH || k == Event::MADE ? 3 : 1;
    PyObject* list = listed(from, e.count[k], width);
    if (!list) {
      Py_DECREF(lists);
      return nullptr;
    }
    PyTuple_SET_ITEM(lists, static_cast<Py_ssize_t>(k), list);
    from += e.count[k];
  }
  if (!lists) return nullptr;
  return Py_BuildValue("(ONKKdOKdd)", e.func ? e.func : Py_None, lists, static_cast<unsigned long long>(e.need),
                       static_cast<unsigned long long>(e.live), 1e-9 * static_cast<double>(e.between_ns),
                       e.extra ? e.extra : Py_None, static_cast<unsigned long long>(e.peak),
                       1e-9 * static_cast<double>(e.wall_ns), e.took ? 1e-9 * static_cast<double>(e.took_ns) : -1.0);
}

// What the run needs unmanaged at this moment, and the most since the last call; what arrives early is not counted
// twice.
uint64_t mark(uint64_t* peak) {
  *peak = 0;
  if (!g.arena) return 0;
  std::lock_guard<std::mutex> lock(g.mu);
  const uint64_t now = mm_arena_take_mark(g.arena, peak);
  const uint64_t early = g.incoming_bytes;
  *peak -= std::min(*peak, std::max(early, tr.incoming));
  tr.incoming = early;
  return now - std::min(now, early);
}

// The end of a cell, or of what Python said, may run anything: it is not `tr` any more.
void let_go(const Tracing& old) {
  for (const Block& b : old.blocks)
    for (Cell* c : b.cells) deferred_decref(reinterpret_cast<PyObject*>(c));
  for (const Event& e : old.events) Py_XDECREF(e.extra);
  for (const auto& [func, kind] : old.kinds) Py_DECREF(func);
  Py_XDECREF(old.on_kind);
  Py_XDECREF(old.on_write);
}

void forget() {
  Tracing old;
  std::swap(old, tr);
  let_go(old);
}

// What belongs to no op: this pass is not going to be a trace. It is told so at its end.
void give_up() {
  PyObject *t, *v, *tb;
  PyErr_Fetch(&t, &v, &tb);
  forget();
  tr.broken = true;
  g.tracing = false;
  PyErr_Restore(t, v, tb);
}

// Stalls, and what was made again.
uint64_t elsewhere_ns() { return g.n.stall_ns.load(std::memory_order_relaxed) + tr.replayed_ns; }

uint64_t without(uint64_t whole, uint64_t part) { return whole > part ? whole - part : 0; }

// -1: Python error set.
int kind_here(PyObject* func) {
  auto it = tr.kinds.find(func);
  if (it != tr.kinds.end()) return it->second;
  PyObject* on_kind = Py_NewRef(tr.on_kind);
  PyObject* r = PyObject_CallOneArg(on_kind, func);
  Py_DECREF(on_kind);
  const long kind = r ? PyLong_AsLong(r) : -1;
  Py_XDECREF(r);
  if (kind < 0) return -1;
  if (tr.kinds.try_emplace(func, static_cast<uint8_t>(kind)).second) Py_INCREF(func);
  return static_cast<int>(kind);
}

// What happened since the last op, and what this one reads.
void before(Event& e, uint64_t begun, PyObject* args, PyObject* kwargs) {
  const uint64_t elsewhere = elsewhere_ns();
  e.between_ns = without(without(begun, tr.left_ns), without(elsewhere, tr.elsewhere_ns));
  settle();
  std::vector<long long> released, alone, ended, inputs;
  ended.swap(tr.ended);
  poll(released, alone, ended);
  watch_all(args, inputs);
  watch_all(kwargs, inputs);
  e.first = tr.numbers.size();
  note(e, Event::RELEASED, released);
  note(e, Event::ALONE, alone);
  note(e, Event::ENDED, ended);
  note_saves(e);
  note(e, Event::USES, tr.uses);
  note(e, Event::INPUTS, inputs);
  note_fresh(e, Event::FRESH);
  tr.any_saved |= e.count[Event::SAVES] > 0;
  tr.uses.clear();
  tr.took = false;
  e.need = mark(&e.peak);
  e.live = tr.live_bytes;
}

bool can_run_again(c10::TensorImpl* t) {
  auto it = g.table.find(t->unsafe_storage().unsafeGetStorageImpl());
  if (it == g.table.end()) return false;
  const Cell* c = it->second;
  return c->recipe && c->recipe->ok && c->recipe->kind && c->recipe->kind->trust.load() != TRUST_NO && !c->exposed;
}

void again_of(PyObject* o, std::vector<long long>& ids) {
  if (!o || o == Py_None) return;
  if (c10::TensorImpl* t = impl_of(o)) {
    const long long id = is_plain(t) && can_run_again(t) ? watch(t) : -1;
    if (id >= 0) ids.push_back(id);
  } else if (PyTuple_Check(o) || PyList_Check(o)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(o); ++i) again_of(PySequence_Fast_GET_ITEM(o, i), ids);
  }
}

// What the op made.
void after(Event& e, PyObject* out) {
  mark(&e.peak);
  std::vector<long long> outputs, again;
  watch_all(out, outputs);
  e.made = tr.numbers.size();
  note(e, Event::OUTPUTS, outputs);
  note_fresh(e, Event::MADE);
  again_of(out, again);
  note(e, Event::AGAIN, again);
  e.took = tr.took;
  e.took_ns = tr.took_ns;
}

}  // namespace

// One pass runs in one thread, and in the engine's own threads where the device has them.
bool traced_here() { return pthread_equal(tr.thread, pthread_self()); }

PyObject* traced_op(PyObject* func, PyObject* types, PyObject* args, PyObject* kwargs) {
  const uint64_t begun = now_ns();
  const int kind = kind_here(func);
  if (kind < 0) return nullptr;
  // Forward passes that no backward ends (an evaluation with grad mode on).
  if (kind != UNNOTED && tr.events.size() >= tr.most_ops) give_up();
  if (kind == UNNOTED || tr.broken) return run_op(func, types, args, kwargs);
  Event e;
  e.func = func;
  before(e, begun, args, kwargs);
  const uint64_t pass = tr.pass, entered = now_ns(), elsewhere = elsewhere_ns();
  PyObject* out = run_op(func, types, args, kwargs);
  if (tr.pass != pass || tr.broken) return out;
  if (!out) {
    give_up();  // what it saved and made before it failed belongs to no op
    return nullptr;
  }
  const uint64_t ended = now_ns(), spent_elsewhere = elsewhere_ns();
  e.wall_ns = without(ended - entered, spent_elsewhere - elsewhere);
  after(e, out);
  if (kind == ASKED) {
    PyObject* on_write = Py_NewRef(tr.on_write);
    e.extra = PyObject_CallFunction(on_write, "OOOi", func, args, kwargs, tr.any_saved ? 1 : 0);
    Py_DECREF(on_write);
    if (!e.extra) {  // Ctrl-C
      Py_DECREF(out);
      give_up();
      return nullptr;
    }
    if (tr.pass != pass || tr.broken) {  // an optimizer's step: the pass begins after it
      Py_DECREF(e.extra);
      return out;
    }
  }
  tr.left_ns = now_ns();
  tr.elsewhere_ns = spent_elsewhere;
  tr.spent_ns += tr.left_ns - ended + entered - begun;
  tr.events.push_back(e);
  return out;
}

void trace_saved(c10::TensorImpl* t, Cell* c) {
  if (!traced_here()) return;
  const long long id = watch(t);
  if (id < 0) return;
  keep_cell(id, c);
  tr.saves.push_back({id, static_cast<long long>(c->save_index)});
}

void trace_used(Cell* c) {
  if (!traced_here()) return;
  auto it = tr.by_cell.find(c);
  if (it != tr.by_cell.end()) {
    Block& b = tr.blocks[static_cast<size_t>(it->second)];
    // The next node asks before its first op: whether the one before has ended shows only now.
    if (b.asked && !(c->strong && c->strong.use_count() > 1)) tr.ended.push_back(it->second);
    b.asked = true;
    tr.uses.push_back(it->second);
    return;
  }
  // Saved before the trace began. If its bytes are gone, they are as good as there: an unmanaged run would have them.
  StorageRef s = c->strong ? c->strong : c->weak.lock();
  long long id = -1;
  if (s) {
    auto known = tr.by_storage.find(s.get());
    if (known != tr.by_storage.end()) id = known->second;
  }
  if (id < 0) id = new_block(s, static_cast<uint64_t>(c->nbytes), false);
  keep_cell(id, c);
  tr.blocks[static_cast<size_t>(id)].asked = true;
  tr.uses.push_back(id);
}

// The op that runs took so long, without our stalls.
void trace_took(uint64_t ns) {
  if (!traced_here()) return;
  tr.took_ns = ns;
  tr.took = true;
}

// trace_begin(on_kind, on_write, most ops): this thread's ops are noted from now on; blocks are counted anew.
static PyObject* py_trace_begin(PyObject*, PyObject* args) {
  static uint64_t passes = 0;
  PyObject *on_kind, *on_write;
  Py_ssize_t most_ops;
  if (!PyArg_ParseTuple(args, "OOn", &on_kind, &on_write, &most_ops)) return nullptr;
  Py_INCREF(on_kind);
  Py_INCREF(on_write);
  forget();
  tr.on_kind = on_kind;
  tr.on_write = on_write;
  tr.most_ops = static_cast<size_t>(most_ops);
  tr.pass = ++passes;
  tr.thread = pthread_self();
  tr.left_ns = now_ns();
  tr.elsewhere_ns = elsewhere_ns();
  g.tracing = true;
  Py_RETURN_NONE;
}

static PyObject* py_trace_end(PyObject*, PyObject*) {
  g.tracing = false;
  forget();
  Py_RETURN_NONE;
}

// trace_take() -> (events, seconds that noting took), or None where the pass went wrong. Ends the tracing. The last
// event, without an op, is what happened after the last op.
static PyObject* py_trace_take(PyObject*, PyObject*) {
  if (tr.broken || !g.tracing) Py_RETURN_NONE;
  Event last;
  before(last, now_ns(), nullptr, nullptr);
  Tracing pass;
  std::swap(pass, tr);
  g.tracing = false;
  pass.events.push_back(last);
  PyObject* all = PyList_New(static_cast<Py_ssize_t>(pass.events.size()));
  for (size_t i = 0; all && i < pass.events.size(); ++i) {
    PyObject* one = told(pass.events[i], pass.numbers);
    if (one)
      PyList_SET_ITEM(all, static_cast<Py_ssize_t>(i), one);
    else
      Py_CLEAR(all);
  }
  let_go(pass);
  return all ? Py_BuildValue("Nd", all, 1e-9 * static_cast<double>(pass.spent_ns)) : nullptr;
}

// trace_count() -> events so far; -1: the pass went wrong.
static PyObject* py_trace_count(PyObject*, PyObject*) {
  return PyLong_FromSsize_t(tr.broken ? -1 : static_cast<Py_ssize_t>(tr.events.size()));
}

// trace_replayed(seconds): so much went into making something again, which the program itself would not have done.
static PyObject* py_trace_replayed(PyObject*, PyObject* seconds) {
  const double spent = PyFloat_AsDouble(seconds);
  if (spent == -1.0 && PyErr_Occurred()) return nullptr;
  if (spent > 0 && g.tracing) tr.replayed_ns += static_cast<uint64_t>(spent * 1e9);
  Py_RETURN_NONE;
}

// trace_blocks(tensors) -> their blocks.
static PyObject* py_trace_blocks(PyObject*, PyObject* o) {
  std::vector<long long> ids;
  watch_all(o, ids);
  return listed(ids.data(), ids.size(), 1);
}

PyMethodDef trace_methods[] = {
    {"trace_begin", py_trace_begin, METH_VARARGS, "trace_begin(on_kind, on_write, most_ops)"},
    {"trace_end", py_trace_end, METH_NOARGS, ""},
    {"trace_take", py_trace_take, METH_NOARGS, "-> what was noted"},
    {"trace_count", py_trace_count, METH_NOARGS, "-> events so far; -1: the pass went wrong"},
    {"trace_replayed", py_trace_replayed, METH_O, "trace_replayed(seconds)"},
    {"trace_blocks", py_trace_blocks, METH_O, ""},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace memmgr
