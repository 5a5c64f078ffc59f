// What a traced pass asks of the shim (memmgr/_trace.py): which blocks live and who holds them, what autograd saves and
// asks back, what an op needs beyond its outputs.
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

struct Tracing {
  PyObject* on_op = nullptr;  // (func, types, args, kwargs) -> the op's result, by run_op()
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

PyObject* numbers(const std::vector<long long>& ids) {
  PyObject* t = PyTuple_New(static_cast<Py_ssize_t>(ids.size()));
  for (size_t i = 0; t && i < ids.size(); ++i)
    PyTuple_SET_ITEM(t, static_cast<Py_ssize_t>(i), PyLong_FromLongLong(ids[i]));
  return t;
}

PyObject* take_fresh() {
  PyObject* t = PyTuple_New(static_cast<Py_ssize_t>(tr.fresh.size()));
  for (size_t i = 0; t && i < tr.fresh.size(); ++i) {
    const Fresh& f = tr.fresh[i];
    PyTuple_SET_ITEM(t, static_cast<Py_ssize_t>(i),
                     Py_BuildValue("LKN", f.block, static_cast<unsigned long long>(f.bytes), PyBool_FromLong(f.leaf)));
  }
  tr.fresh.clear();
  return t;
}

PyObject* take_saves() {
  PyObject* t = PyTuple_New(static_cast<Py_ssize_t>(tr.saves.size()));
  for (size_t i = 0; t && i < tr.saves.size(); ++i)
    PyTuple_SET_ITEM(t, static_cast<Py_ssize_t>(i), Py_BuildValue("LL", tr.saves[i].block, tr.saves[i].index));
  tr.saves.clear();
  return t;
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

void forget() {
  std::vector<Cell*> cells;
  for (Block& b : tr.blocks) cells.insert(cells.end(), b.cells.begin(), b.cells.end());
  PyObject* on_op = tr.on_op;
  tr = Tracing{};
  for (Cell* c : cells) deferred_decref(reinterpret_cast<PyObject*>(c));
  Py_XDECREF(on_op);
}

}  // namespace

// One pass runs in one thread, and in the engine's own threads where the device has them.
bool traced_here() { return pthread_equal(tr.thread, pthread_self()); }

PyObject* traced_op(PyObject* func, PyObject* types, PyObject* args, PyObject* kwargs) {
  return PyObject_CallFunctionObjArgs(tr.on_op, func, types, args, kwargs, nullptr);
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

// trace_begin(on_op): this thread's ops go to on_op(func, types, args, kwargs) from now on; blocks are counted anew.
static PyObject* py_trace_begin(PyObject*, PyObject* on_op) {
  Py_INCREF(on_op);
  forget();
  tr.on_op = on_op;
  tr.thread = pthread_self();
  g.tracing = true;
  Py_RETURN_NONE;
}

static PyObject* py_trace_end(PyObject*, PyObject*) {
  g.tracing = false;
  forget();
  Py_RETURN_NONE;
}

// trace_before(args, kwargs) -> (released, alone, ended, saves, uses, inputs, new blocks, bytes needed unmanaged, live
// bytes): what happened since the last op, and what this one reads.
static PyObject* py_trace_before(PyObject*, PyObject* args) {
  PyObject *a, *kw;
  if (!PyArg_ParseTuple(args, "OO", &a, &kw)) return nullptr;
  settle();
  std::vector<long long> released, alone, ended, inputs;
  ended.swap(tr.ended);
  poll(released, alone, ended);
  watch_all(a, inputs);
  watch_all(kw, inputs);
  tr.took = false;
  std::vector<long long> uses;
  uses.swap(tr.uses);
  uint64_t peak;
  const uint64_t need = mark(&peak);
  return Py_BuildValue("(NNNNNNNKK)", numbers(released), numbers(alone), numbers(ended), take_saves(), numbers(uses),
                       numbers(inputs), take_fresh(), static_cast<unsigned long long>(need),
                       static_cast<unsigned long long>(tr.live_bytes));
}

static bool can_run_again(c10::TensorImpl* t) {
  auto it = g.table.find(t->unsafe_storage().unsafeGetStorageImpl());
  if (it == g.table.end()) return false;
  const Cell* c = it->second;
  return c->recipe && c->recipe->ok && c->recipe->kind && c->recipe->kind->trust.load() != TRUST_NO && !c->exposed;
}

static void again_of(PyObject* o, std::vector<long long>& ids) {
  if (!o || o == Py_None) return;
  if (c10::TensorImpl* t = impl_of(o)) {
    const long long id = is_plain(t) && can_run_again(t) ? watch(t) : -1;
    if (id >= 0) ids.push_back(id);
  } else if (PyTuple_Check(o) || PyList_Check(o)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(o); ++i) again_of(PySequence_Fast_GET_ITEM(o, i), ids);
  }
}

// trace_after(result) -> (outputs, new blocks, outputs with a recipe, the most bytes needed unmanaged since
// trace_before, seconds or -1): what the op made.
static PyObject* py_trace_after(PyObject*, PyObject* out) {
  uint64_t peak;
  mark(&peak);
  std::vector<long long> outputs, again;
  watch_all(out, outputs);
  again_of(out, again);
  return Py_BuildValue("(NNNKd)", numbers(outputs), take_fresh(), numbers(again), static_cast<unsigned long long>(peak),
                       tr.took ? 1e-9 * static_cast<double>(tr.took_ns) : -1.0);
}

// trace_blocks(tensors) -> their blocks.
static PyObject* py_trace_blocks(PyObject*, PyObject* o) {
  std::vector<long long> ids;
  watch_all(o, ids);
  return numbers(ids);
}

static PyObject* py_run_op(PyObject*, PyObject* const* a, Py_ssize_t n) {
  if (n != 4) return PyErr_Format(PyExc_TypeError, "run_op(func, types, args, kwargs)");
  const LazyViews lazy_views;
  return run_op(a[0], a[1], a[2], a[3]);
}

PyMethodDef trace_methods[] = {
    {"trace_begin", py_trace_begin, METH_O, "trace_begin(on_op)"},
    {"trace_end", py_trace_end, METH_NOARGS, ""},
    {"trace_before", py_trace_before, METH_VARARGS, ""},
    {"trace_after", py_trace_after, METH_O, ""},
    {"trace_blocks", py_trace_blocks, METH_O, ""},
    {"run_op", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&py_run_op)), METH_FASTCALL,
     "run_op(func, types, args, kwargs): what dispatch does when nothing is traced"},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace memmgr
