// What Python asks of bytes: who could leave, who leaves, who comes back.
#include "shim.h"

namespace memmgr {

// The cost of what must run again before `c` can, each op once: ancestors that are not in memory, and those that nobody
// saved. These are there as long as the program has them, which is not until backward wants `c`; but for what was made
// from nothing, the program's data.
static double chain_cost(Cell* c, uint32_t stamp, std::vector<Recipe*>& work) {
  double sum = 0;
  work.clear();
  if (c->recipe) {
    c->recipe->stamp = stamp;
    work.push_back(c->recipe);
  }
  int steps = 0;
  while (!work.empty() && steps++ < 512) {
    Recipe* r = work.back();
    work.pop_back();
    for (int i = 0; i < r->nlinks; ++i) {
      Cell* p = r->links[i].cell;
      if (!p || !p->recipe || p->recipe->stamp == stamp || p->slot >= 0) continue;
      if (is_present(p) && (p->handles > 0 || p->recipe->nlinks == 0)) continue;
      p->recipe->stamp = stamp;
      sum += seconds_of(p->recipe);
      work.push_back(p->recipe);
    }
  }
  return sum;
}

static double children_cost(Cell* c, uint32_t stamp, std::vector<Cell*>& work) {
  double sum = 0;
  work.clear();
  work.push_back(c);
  int steps = 0;
  while (!work.empty() && steps++ < 128) {
    Cell* x = work.back();
    work.pop_back();
    int fan = 0;
    for (Link* l = x->named_by; l && fan < 32; l = l->next, ++fan) {
      Recipe* r = l->recipe;
      if (r->stamp == stamp) continue;
      r->stamp = stamp;
      for (Cell* out : r->outputs)
        if (out && out->gone == EVICTED) {
          sum += seconds_of(r);
          work.push_back(out);
          break;
        }
    }
  }
  return sum;
}

// columns() -> (cells, size, staleness, cost, chain, component, recomputable, clean, seq): what could leave now, as
// buffers of int64 / float64 / uint8.
static PyObject* py_columns(PyObject*, PyObject* args) {
  int neighbours = 1;
  if (!PyArg_ParseTuple(args, "|p", &neighbours)) return nullptr;
  settle();
  std::vector<Cell*> cells;
  {
    std::lock_guard<std::mutex> lock(g.mu);
    for (Cell* c = g.oldest; c; c = c->next)
      if (c->armed == KEEP && ours_alone_locked(c)) cells.push_back(c);
  }
  const auto n = static_cast<Py_ssize_t>(cells.size());
  PyObject* list = PyList_New(n);
  PyObject* bufs[8] = {};
  const size_t width[8] = {8, 8, 8, 8, 8, 1, 1, 8};
  for (int i = 0; i < 8; ++i) bufs[i] = PyByteArray_FromStringAndSize(nullptr, n * static_cast<Py_ssize_t>(width[i]));
  if (!list || !bufs[7]) return nullptr;
  auto* size = reinterpret_cast<int64_t*>(PyByteArray_AS_STRING(bufs[0]));
  auto* stale = reinterpret_cast<double*>(PyByteArray_AS_STRING(bufs[1]));
  auto* cost = reinterpret_cast<double*>(PyByteArray_AS_STRING(bufs[2]));
  auto* chain = reinterpret_cast<double*>(PyByteArray_AS_STRING(bufs[3]));
  auto* component = reinterpret_cast<double*>(PyByteArray_AS_STRING(bufs[4]));
  auto* recomputable = reinterpret_cast<uint8_t*>(PyByteArray_AS_STRING(bufs[5]));
  auto* clean = reinterpret_cast<uint8_t*>(PyByteArray_AS_STRING(bufs[6]));
  auto* seq = reinterpret_cast<int64_t*>(PyByteArray_AS_STRING(bufs[7]));
  std::vector<Recipe*> work;
  std::vector<Cell*> work2;
  for (Py_ssize_t i = 0; i < n; ++i) {
    Cell* c = cells[static_cast<size_t>(i)];
    Py_INCREF(c);
    PyList_SET_ITEM(list, i, reinterpret_cast<PyObject*>(c));
    size[i] = c->nbytes;
    stale[i] = g.clock - c->last_access;
    cost[i] = c->recipe ? seconds_of(c->recipe) : c->cost;
    chain[i] = component[i] = 0;
    if (neighbours && c->recipe) {
      chain[i] = chain_cost(c, ++g.stamp, work);
      component[i] = chain[i] + children_cost(c, ++g.stamp, work2);
    }
    if (c->recipe && c->recipe->kind && c->recipe->kind->binary.load() && worth_bits(c)) {
      cost[i] = bits_seconds(c->nbytes);
      chain[i] = component[i] = 0;
    }
    recomputable[i] = can_evict(c) && room_to_remake(c);
    clean[i] = c->slot >= 0;
    seq[i] = c->seq;
  }
  return Py_BuildValue("(NNNNNNNNN)", list, bufs[0], bufs[1], bufs[2], bufs[3], bufs[4], bufs[5], bufs[6], bufs[7]);
}

// Onto the list that malloc takes from, at its end.
void arm_locked(Cell* c, uint8_t action, bool by_plan) {
  c->armed = action;
  c->by_plan = by_plan;
  c->armed_at = static_cast<int64_t>(g.armed.size());
  g.armed.push_back(c);
  g.armed_bytes += static_cast<uint64_t>(c->nbytes);
}

void clear_armed_locked() {
  for (Cell* c : g.armed)
    if (c) c->armed = KEEP;
  g.armed.clear();
  g.armed_next = 0;
  g.armed_bytes = 0;
}

// arm([(cell, action)]): the order in which cells leave when malloc needs room.
static PyObject* py_arm(PyObject*, PyObject* o) {
  PyObject* seq = PySequence_Fast(o, "a sequence of (cell, action)");
  if (!seq) return nullptr;
  std::lock_guard<std::mutex> lock(g.mu);
  if (g.armed_next >= g.armed.size()) clear_armed_locked();
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(seq); ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(seq, i);
    auto* c = reinterpret_cast<Cell*>(PyTuple_GET_ITEM(item, 0));
    const auto action = static_cast<uint8_t>(PyLong_AsLong(PyTuple_GET_ITEM(item, 1)));
    if (action != KEEP && c->armed == KEEP && c->listed) arm_locked(c, action, false);
  }
  Py_DECREF(seq);
  Py_RETURN_NONE;
}

static PyObject* py_disarm_all(PyObject*, PyObject*) {
  std::lock_guard<std::mutex> lock(g.mu);
  clear_armed_locked();
  Py_RETURN_NONE;
}

// release(cell, action) -> bool: now, from Python.
static PyObject* py_release(PyObject*, PyObject* args) {
  PyObject* co;
  int action;
  if (!PyArg_ParseTuple(args, "O!i", &CellType, &co, &action)) return nullptr;
  settle();
  bool done;
  auto* c = reinterpret_cast<Cell*>(co);
  Py_BEGIN_ALLOW_THREADS {
    std::unique_lock<std::mutex> lock(g.mu);
    done = release_cell_locked(c, static_cast<uint8_t>(action), lock, false);
  }
  Py_END_ALLOW_THREADS return PyBool_FromLong(done);
}

// Queues an early copy of bytes that are ours alone.
bool write_back_locked(Cell* c) {
  if (!g.tier || c->slot >= 0 || !ours_alone_locked(c) || !versions_current(c)) return false;
  const mm_slot slot =
      mm_tier_write(g.tier, c->strong->_mutable_data_ptr_no_checks().get(), static_cast<uint64_t>(c->nbytes));
  if (slot < 0) {
    g.n.tier_errors++;
    g.tier_error = std::strerror(static_cast<int>(-slot));
    return false;
  }
  c->slot = slot;
  c->slot_state = WRITING;
  g.n.write_backs++;
  g.n.offloads++;
  g.n.offload_bytes += static_cast<uint64_t>(c->nbytes);
  return true;
}

// write_back(cell) -> bool
static PyObject* py_write_back(PyObject*, PyObject* o) {
  std::lock_guard<std::mutex> lock(g.mu);
  return PyBool_FromLong(write_back_locked(reinterpret_cast<Cell*>(o)));
}

// 1 begun, 0 no room, -1 nothing to do. The GIL is held; it is dropped meanwhile.
int begin_reload(Cell* c, uint64_t keep_free) {
  const auto wanted = [c] {
    return c->gone == OFFLOADED && !c->incoming.get() && !c->busy && c->slot >= 0 && g.tier && g.arena;
  };
  mm_stream home;
  {
    std::lock_guard<std::mutex> lock(g.mu);
    if (!wanted()) return -1;
    home = c->filled_on;
  }
  const auto n = static_cast<uint64_t>(c->nbytes);
  at::DataPtr bytes;
  // Mapping memory on a device may wait for it. What it took is counted at once: the GIL is not had back so soon, and
  // whoever has it meanwhile may be measuring what an op needs.
  Py_BEGIN_ALLOW_THREADS bytes = try_block(n, keep_free, home);
  if (bytes.get()) {
    std::lock_guard<std::mutex> lock(g.mu);
    g.incoming_bytes += n;
  }
  Py_END_ALLOW_THREADS if (!bytes.get()) return 0;
  std::lock_guard<std::mutex> lock(g.mu);
  const bool late = !wanted();  // somebody needed it at once
  if (late || mm_tier_read(g.tier, c->slot, bytes.get()) < 0) {
    g.incoming_bytes -= std::min(g.incoming_bytes, n);
    return late ? -1 : 0;
  }
  c->incoming = std::move(bytes);
  return 1;
}

// prefetch(cell, keep_free) -> 1 begun, 0 no room, -1 nothing to do.
static PyObject* py_prefetch(PyObject*, PyObject* args) {
  PyObject* co;
  unsigned long long keep_free;
  if (!PyArg_ParseTuple(args, "O!K", &CellType, &co, &keep_free)) return nullptr;
  return PyLong_FromLong(begin_reload(reinterpret_cast<Cell*>(co), keep_free));
}

static PyObject* py_clone_storage(PyObject*, PyObject* o) {
  // A private copy of the cell's bytes, for ops that write (rule 2); returned as a byte tensor.
  auto* c = reinterpret_cast<Cell*>(o);
  StorageRef src;
  mm_stream filled_on;
  {
    std::lock_guard<std::mutex> lock(g.mu);
    src = c->strong ? c->strong : c->weak.lock();
    filled_on = c->filled_on;
  }
  if (!src || !data_present(src.get()))
    return PyErr_Format(PyExc_RuntimeError, "memmgr: the cell's bytes are not in memory");
  if (!wait_for_filling(src.get(), filled_on, RULE_FILLED_REPLAY)) return nullptr;
  note_stream(src.get(), RULE_REPLAYED);
  StorageRef copy;
  std::string oom;
  Py_BEGIN_ALLOW_THREADS try {
    copy = storage_copy(src.get());
    if (!copy) oom = "memmgr: a copy on the device failed";
  } catch (const std::exception& e) {
    oom = e.what();
  }
  Py_END_ALLOW_THREADS return oom.empty() ? wrap(byte_tensor(std::move(copy))) : raise_oom(oom);
}

// take(cell, tensor) -> the tensor, if it alone has the bytes of `cell` and nobody will ask the cell for them: they are
// the caller's to write to, and the cell is one that died with its bytes. None otherwise: clone_storage() then.
static PyObject* py_take(PyObject*, PyObject* args) {
  PyObject *co, *to;
  if (!PyArg_ParseTuple(args, "O!O", &CellType, &co, &to)) return nullptr;
  auto* c = reinterpret_cast<Cell*>(co);
  c10::TensorImpl* t = impl_of(to);
  if (!t || !is_plain(t)) Py_RETURN_NONE;
  StorageRef s = storage_of(t);
  {
    std::lock_guard<std::mutex> lock(g.mu);
    // Two: the tensor's and the one just made.
    if (c->handles > 0 || c->strong || c->busy || c->managed || c->slot >= 0 || c->gone != PRESENT ||
        c->weak._unsafe_get_target() != s.get() || s.use_count() != 2 || !data_present(s.get()))
      Py_RETURN_NONE;
  }
  if (!wait_for_filling(s.get(), c->filled_on, RULE_FILLED_REPLAY)) return nullptr;
  note_stream(s.get(), RULE_REPLAYED);
  watch_in(c, StorageRef());
  return Py_NewRef(to);
}

// lease(cell) -> a byte tensor over the whole storage, or None when the bytes are not in memory. While it lives the
// cell is not ours alone, so it stays.
static PyObject* py_lease(PyObject*, PyObject* o) {
  auto* c = reinterpret_cast<Cell*>(o);
  StorageRef s;
  {
    std::lock_guard<std::mutex> lock(g.mu);
    if (c->gone == PRESENT) s = c->strong ? c->strong : c->weak.lock();
  }
  if (!s || !data_present(s.get())) Py_RETURN_NONE;
  return wrap(byte_tensor(std::move(s)));
}

// expose(tensor): a pointer to its memory leaves torch's sight; raw writes may come (rule 6).
static PyObject* py_expose(PyObject*, PyObject* o) {
  settle();
  c10::TensorImpl* t = impl_of(o);
  if (!t || !is_plain(t)) Py_RETURN_NONE;
  Cell* c = find_cell(t);
  if (!c) Py_RETURN_NONE;
  // Parameters are handed to optimizers' and profilers' raw code all the time, and their writes count versions.
  if (!c->recipe && t->requires_grad()) Py_RETURN_NONE;
  expose_cell(c);
  note_stream(t->unsafe_storage().unsafeGetStorageImpl(), RULE_EXPOSED);  // whoever has it computes on this stream
  Py_RETURN_NONE;
}

// offloaded(limit) -> (cells that backward will need, soonest first, position of the last use, bytes in flight)
static PyObject* py_offloaded(PyObject*, PyObject* o) {
  const long limit = PyLong_AsLong(o);
  std::vector<Cell*> cells;
  unsigned long long in_flight = 0;
  {
    std::lock_guard<std::mutex> lock(g.mu);
    for (Cell* c = g.newest; c && static_cast<long>(cells.size()) < limit; c = c->prev) {
      if (c->gone != OFFLOADED || c->managed) continue;
      if (c->incoming.get()) {
        if (mm_tier_poll(g.tier, c->slot) == 0) in_flight += static_cast<unsigned long long>(c->nbytes);
        continue;
      }
      cells.push_back(c);
    }
  }
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(cells.size()));
  for (size_t i = 0; list && i < cells.size(); ++i) {
    Py_INCREF(cells[i]);
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), reinterpret_cast<PyObject*>(cells[i]));
  }
  return Py_BuildValue("(NLK)", list, static_cast<long long>(g.last_unpacked), in_flight);
}

// tier_probe(bytes) -> (seconds to write, seconds to read) or None
static PyObject* py_tier_probe(PyObject*, PyObject* o) {
  const auto n = static_cast<size_t>(PyLong_AsUnsignedLongLong(o));
  if (!g.tier) Py_RETURN_NONE;
  uint64_t t0 = 0, t1 = 0, t2 = 0;
  int64_t rc = 0;
  at::DataPtr block = g.device ? try_block(n, 0, g.main_stream) : at::DataPtr();
  Py_BEGIN_ALLOW_THREADS void* p = block.get();
  if (p || (!g.device && posix_memalign(&p, 4096, n) == 0)) {
    if (!g.device) std::memset(p, 1, n);
    t0 = now_ns();
    const mm_slot slot = mm_tier_write(g.tier, p, n);
    rc = slot < 0 ? slot : mm_tier_wait(g.tier, slot);
    t1 = now_ns();
    if (rc >= 0) {
      rc = mm_tier_read(g.tier, slot, p);
      if (rc >= 0) rc = mm_tier_wait(g.tier, slot);
    }
    t2 = now_ns();
    if (slot >= 0) mm_tier_free(g.tier, slot);
    if (!g.device) free(p);
  } else {
    rc = -1;
  }
  Py_END_ALLOW_THREADS if (rc < 0) Py_RETURN_NONE;
  return Py_BuildValue("dd", static_cast<double>(t1 - t0) * 1e-9, static_cast<double>(t2 - t1) * 1e-9);
}

static PyObject* py_position(PyObject*, PyObject*) { return PyLong_FromLongLong(g.last_unpacked); }

static PyObject* py_set_trial(PyObject*, PyObject* o) {
  tl_trial = PyObject_IsTrue(o) == 1;
  Py_RETURN_NONE;
}

static PyObject* py_set_no_reclaim(PyObject*, PyObject* o) {
  tl_no_reclaim = PyObject_IsTrue(o) == 1;
  Py_RETURN_NONE;
}

static PyObject* py_set_recomputing(PyObject*, PyObject* o) {
  const bool before = tl_recomputing;
  tl_recomputing = PyObject_IsTrue(o) == 1;
  if (tl_recomputing) tl_refused_floor = 0;
  return PyBool_FromLong(before);
}

static PyObject* py_refused(PyObject*, PyObject*) {
  raise_floor(tl_refused_floor);
  tl_refused_floor = 0;
  Py_RETURN_NONE;
}

static PyObject* py_storage_info(PyObject*, PyObject* o) {
  // (address of the storage, bytes, covers it all and is dense, is ours to manage)
  c10::TensorImpl* t = impl_of(o);
  if (!t || !is_plain(t)) Py_RETURN_NONE;
  auto* s = t->unsafe_storage().unsafeGetStorageImpl();
  const bool whole = t->numel() * static_cast<int64_t>(t->itemsize()) == static_cast<int64_t>(s->nbytes()) &&
                     t->is_non_overlapping_and_dense();
  const void* p = s->_mutable_data_ptr_no_checks().get();
  return Py_BuildValue("KKNN", (unsigned long long)reinterpret_cast<uintptr_t>(s), (unsigned long long)s->nbytes(),
                       PyBool_FromLong(whole), PyBool_FromLong(p && ours(p)));
}

// The objects of these types (or of subtypes) that the garbage collector knows. gc.get_objects() hands out every one,
// also the tuple that another thread is about to fill from a generator; if that thread gets its turn while the list
// lives, tuple() finds a reference that is not its own and fails with a SystemError. Here the list comes and goes
// without a bytecode, an allocation that could start a collection, or a look at an object's own attributes in between.
static PyObject* py_objects_of(PyObject*, PyObject* kinds) {
  if (!PyTuple_Check(kinds)) return PyErr_Format(PyExc_TypeError, "objects_of() takes a tuple of types");
  PyObject* gc = PyImport_ImportModule("gc");
  PyObject* get = gc ? PyObject_GetAttrString(gc, "get_objects") : nullptr;
  Py_XDECREF(gc);
  PyObject* found = get ? PyList_New(0) : nullptr;
  PyObject* all = found ? PyObject_CallNoArgs(get) : nullptr;
  Py_XDECREF(get);
  bool ok = all != nullptr;
  for (Py_ssize_t i = 0; ok && i < PyList_GET_SIZE(all); ++i) {
    PyObject* o = PyList_GET_ITEM(all, i);
    for (Py_ssize_t k = 0; ok && k < PyTuple_GET_SIZE(kinds); ++k) {
      if (!PyType_IsSubtype(Py_TYPE(o), reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(kinds, k)))) continue;
      ok = PyList_Append(found, o) == 0;
      break;
    }
  }
  Py_XDECREF(all);
  if (!ok) Py_CLEAR(found);
  return found;
}

PyMethodDef cell_functions[] = {
    {"lookup", py_lookup, METH_O, "the tensor's cell; an unknown storage becomes a root"},
    {"find", py_find, METH_O, "the tensor's cell if it is known and unchanged"},
    {"handle", py_handle, METH_O, "a handle on the tensor"},
    {"tensor", py_tensor, METH_VARARGS, "tensor(ref[, owner])"},
    {"fill", py_fill, METH_VARARGS, "fill(cell, tensor)"},
    {"bring_back", py_bring_back, METH_O, "reload; True when the cell wants recomputation instead"},
    {"checksum", py_checksum, METH_O, "of a tensor's whole storage"},
    {"overwritten", py_overwritten, METH_VARARGS, "overwritten(tensor, recipe or None) -> Cell"},
    {"would_strand", py_would_strand, METH_O, ""},
    {"would_strand_exposed", py_would_strand_exposed, METH_O, ""},
    {"lose", py_lose, METH_O, ""},
    {"cut_children", py_cut_children, METH_O, ""},
    {"drop_recipe", py_drop_recipe, METH_O, ""},
    {"end_pass", py_end_pass, METH_NOARGS, ""},
    {"forget_recipes", py_forget_recipes, METH_NOARGS, ""},
    {"table", py_table, METH_NOARGS, "all cells that are known by a storage"},
    {"misplaced", py_misplaced, METH_NOARGS, "for tests: how many entries of the table stand for another storage; 0"},
    {"kept_roots", py_kept_roots, METH_NOARGS, ""},
    {"forget_all", py_forget_all, METH_NOARGS, ""},
    {"handled", py_handled, METH_NOARGS, ""},
    {"columns", py_columns, METH_VARARGS, ""},
    {"arm", py_arm, METH_O, ""},
    {"disarm_all", py_disarm_all, METH_NOARGS, ""},
    {"release", py_release, METH_VARARGS, "release(cell, action) -> bool"},
    {"write_back", py_write_back, METH_O, ""},
    {"prefetch", py_prefetch, METH_VARARGS, "prefetch(cell, keep_free)"},
    {"clone_storage", py_clone_storage, METH_O, ""},
    {"take", py_take, METH_VARARGS, "take(cell, tensor) -> the tensor, if its bytes are the caller's now, or None"},
    {"lease", py_lease, METH_O, "keeps a cell's bytes in memory while the result lives"},
    {"expose", py_expose, METH_O, "a pointer to the tensor's memory was handed out"},
    {"offloaded", py_offloaded, METH_O, "(cells, position, bytes in flight)"},
    {"tier_probe", py_tier_probe, METH_O, ""},
    {"position", py_position, METH_NOARGS, "order of the save that was used last"},
    {"set_no_reclaim", py_set_no_reclaim, METH_O, ""},
    {"set_trial", py_set_trial, METH_O, "this thread's allocations are a trial's: they say nothing about the floor"},
    {"set_recomputing", py_set_recomputing, METH_O, "returns what it was: this thread's allocations are a replay's"},
    {"refused", py_refused, METH_NOARGS,
     "this thread's recomputation was refused memory for good: the floor is higher"},
    {"storage_info", py_storage_info, METH_O, ""},
    {"objects_of", py_objects_of, METH_O,
     "objects_of((type, ...)) -> list of what the garbage collector knows of them"},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace memmgr
