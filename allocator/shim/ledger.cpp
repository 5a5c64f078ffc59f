// What Python asks of cells: lookup, versions, recipes' ends.
#include "shim.h"

namespace memmgr {

// ---- functions ----

static PyObject* py_lookup(PyObject*, PyObject* o) {
  settle();
  c10::TensorImpl* t = impl_of(o);
  if (!t || !is_plain(t)) Py_RETURN_NONE;
  return obj_or_none(reinterpret_cast<PyObject*>(lookup_cell(t)));
}

static PyObject* py_find(PyObject*, PyObject* o) {
  settle();
  c10::TensorImpl* t = impl_of(o);
  if (!t || !is_plain(t)) Py_RETURN_NONE;
  return obj_or_none(reinterpret_cast<PyObject*>(find_cell(t)));
}

static PyObject* py_handle(PyObject*, PyObject* o) {
  settle();
  c10::TensorImpl* t = impl_of(o);
  if (!t || !is_plain(t)) Py_RETURN_NONE;
  Cell* c = lookup_cell(t);
  return c ? reinterpret_cast<PyObject*>(make_ref(t, c, true)) : nullptr;
}

// The ref as a tensor over its cell's storage, for a replay. Null: Python error set.
static PyObject* tensor_again(const Ref* r, StorageRef s) {
  if (!s || !data_present(s.get()))
    return PyErr_Format(PyExc_RuntimeError, "memmgr: the cell's bytes are not in memory");
  if (s->nbytes() < static_cast<size_t>(r->cell->nbytes))
    return PyErr_Format(PyExc_RuntimeError, "memmgr: a storage shrank under a saved view");
  r->cell->last_access = g.clock;
  return wrap(tensor_of(r, std::move(s)));
}

static PyObject* tensor_again(const Ref* r) {
  StorageRef s;
  mm_stream filled_on;
  {
    std::lock_guard<std::mutex> lock(g.mu);
    s = r->cell->strong ? r->cell->strong : r->cell->weak.lock();
    filled_on = r->cell->filled_on;
  }
  // Replays run below the mode, so nobody else says on which stream they read.
  if (s && data_present(s.get())) {
    if (!wait_for_filling(s.get(), filled_on, RULE_FILLED_REPLAY)) return nullptr;
    note_stream(s.get(), RULE_REPLAYED);
  }
  return tensor_again(r, std::move(s));
}

// The ref as a tensor over `storage_owner`'s storage (default: the cell's own). The bytes must be present.
static PyObject* py_tensor(PyObject*, PyObject* args) {
  PyObject *ro, *owner = Py_None;
  if (!PyArg_ParseTuple(args, "O!|O", &RefType, &ro, &owner)) return nullptr;
  const auto* r = reinterpret_cast<Ref*>(ro);
  if (owner == Py_None) return tensor_again(r);
  c10::TensorImpl* t = impl_of(owner);
  if (!t) return PyErr_Format(PyExc_TypeError, "not a tensor");
  return tensor_again(r, storage_of(t));
}

// fill(cell, tensor): the bytes of `cell` are back; they are the tensor's storage.
static PyObject* py_fill(PyObject*, PyObject* args) {
  PyObject *co, *to;
  if (!PyArg_ParseTuple(args, "O!O", &CellType, &co, &to)) return nullptr;
  auto* c = reinterpret_cast<Cell*>(co);
  c10::TensorImpl* t = impl_of(to);
  if (!t || !is_plain(t)) return PyErr_Format(PyExc_TypeError, "memmgr: cannot adopt this tensor");
  StorageRef s = storage_of(t);
  if (static_cast<int64_t>(s->nbytes()) != c->nbytes)
    return PyErr_Format(PyExc_RuntimeError, "memmgr: recomputation gave %zu bytes instead of %lld", s->nbytes(),
                        static_cast<long long>(c->nbytes));
  if (c->busy) wait_not_busy(c);
  watch_in(c, s);
  Bits* bits;
  {
    std::lock_guard<std::mutex> lock(g.mu);
    bits = c->bits;
    c->bits = nullptr;
    note_gone_over(c);
    if (c->listed && c->gone != PRESENT) g.handled_bytes += static_cast<uint64_t>(c->nbytes);
    c->gone = PRESENT;
    if (c->handles > 0 || (!c->recipe && c->names > 0))
      c->strong = s;
    else
      c->strong.reset();
    c->filled_on = g.device && managed_here(s.get()) ? stream_now() : kNotFilled;
    c->versions.clear();
    c->versions.push_back({t->version_counter(), t->version_counter().current_version(), c->handles > 0});
    c->has_checksum = false;
    c->last_access = g.clock;
    price_locked(c);
  }
  end_bits(bits, true);
  enter(s.get(), c);
  Py_RETURN_NONE;
}

static PyObject* py_bring_back(PyObject*, PyObject* o) {
  bool recompute;
  if (!bring_back(reinterpret_cast<Cell*>(o), &recompute)) return nullptr;
  return PyBool_FromLong(recompute);
}

static PyObject* py_checksum(PyObject*, PyObject* o) {
  c10::TensorImpl* t = impl_of(o);
  if (!t || !is_plain(t)) Py_RETURN_NONE;
  auto* s = t->unsafe_storage().unsafeGetStorageImpl();
  const at::Device where = s->device();
  if ((where.type() != c10::DeviceType::CPU && !managed_here(s)) || !data_present(s)) Py_RETURN_NONE;
  const void* p = s->_mutable_data_ptr_no_checks().get();
  const size_t n = s->nbytes();
  uint64_t h = 0;
  bool got;
  Py_BEGIN_ALLOW_THREADS got = checksum_of(where, p, n, &h);
  Py_END_ALLOW_THREADS if (!got) return PyErr_Format(PyExc_RuntimeError, "memmgr: a tensor cannot be read back");
  return PyLong_FromUnsignedLongLong(h);
}

// overwritten(tensor, recipe or None) -> Cell: the op that just ran wrote to the tensor's storage.
static PyObject* py_overwritten(PyObject*, PyObject* args) {
  PyObject *to, *ro;
  if (!PyArg_ParseTuple(args, "OO", &to, &ro)) return nullptr;
  c10::TensorImpl* t = impl_of(to);
  if (!t || !is_plain(t)) Py_RETURN_NONE;
  c10::StorageImpl* s = t->unsafe_storage().unsafeGetStorageImpl();
  auto it = g.table.find(s);
  Cell* old = it == g.table.end() ? nullptr : it->second;
  if (old && ro == Py_None && old->handles == 0 && old->names == 0 && (!old->exposed || t->requires_grad())) {
    table_erase(it);  // nobody asks for the old bytes and nobody can make the new ones: forget it
    Py_RETURN_NONE;
  }
  if (!old && ro == Py_None) Py_RETURN_NONE;
  const bool exposed = old && old->exposed;  // the cell may be gone when it is asked for
  if (old) {
    Py_INCREF(old);
    if (old->names > 0 && !old->recipe) {
      old->lost = true;
      cut(old, true, false, nullptr);
    }
    if (old->handles > 0 && !saved_under(old, t)) {
      changed_in_place(old);
      Py_DECREF(old);
      Py_RETURN_NONE;
    }
    if (old->handles > 0) {
      // Whether this is an error shows when the counter has moved, or has not: see settle_doubtful().
      Py_INCREF(old);
      g.doubtful.push_back({old, pthread_self(), now_ns()});
      std::lock_guard<std::mutex> lock(g.mu);
      disarm_locked(old);
    } else {
      drop_slot(old);
      release_strong(old);
      watch_in(old, StorageRef());
    }
    it = g.table.find(s);
    if (it != g.table.end()) table_erase(it);
    deferred_decref(reinterpret_cast<PyObject*>(old));
  }
  Cell* c = make_cell(t);
  if (!c) return nullptr;
  c->exposed |= exposed;
  c->unsettled = true;
  Py_INCREF(c);
  g.unsettled.push_back({c, pthread_self(), now_ns()});
  if (ro != Py_None) {
    auto* r = reinterpret_cast<Recipe*>(ro);
    Py_INCREF(r);
    c->recipe = r;
    c->maker = r->kind;
    c->cost = r->cost;
    r->outputs.push_back(c);
    note_made(r, c->nbytes);
  }
  enter(s, c);
  return reinterpret_cast<PyObject*>(c);
}

// would_strand(tensor) -> cells that are wanted, gone, and lost if this storage were overwritten now.
static PyObject* py_would_strand(PyObject*, PyObject* o) {
  PyObject* list = PyList_New(0);
  c10::TensorImpl* t = PyObject_TypeCheck(o, &CellType) ? nullptr : impl_of(o);
  Cell* c = nullptr;
  if (t) {
    if (!is_plain(t)) return list;
    auto it = g.table.find(t->unsafe_storage().unsafeGetStorageImpl());
    if (it == g.table.end()) return list;
    c = it->second;
  } else if (PyObject_TypeCheck(o, &CellType)) {
    c = reinterpret_cast<Cell*>(o);
  } else {
    return list;
  }
  if (c->names == 0) return list;
  std::vector<Cell*> stranded;
  if (!c->recipe) {
    cut(c, true, true, &stranded);
  } else if (t && c->handles > 0 && !t->is_inference()) {
    // A write through an alias with a counter of its own keeps this cell and cuts its children: see overwritten().
    if (!saved_under(c, t)) cut(c, false, true, &stranded);
  }
  for (Cell* s : stranded) PyList_Append(list, reinterpret_cast<PyObject*>(s));
  return list;
}

// dependants(cell): the wanted cells that are gone and whose recomputation could read this cell's storage.
// would_strand_exposed(tensor) -> cells that are wanted, gone, and lost when the tensor's memory may change unseen.
static PyObject* py_would_strand_exposed(PyObject*, PyObject* o) {
  PyObject* list = PyList_New(0);
  c10::TensorImpl* t = impl_of(o);
  Cell* c = t && is_plain(t) ? find_cell(t) : nullptr;
  if (!c || c->exposed || (c->handles == 0 && c->recipe)) return list;
  std::vector<Cell*> stranded;
  cut(c, false, true, &stranded);
  for (Cell* s : stranded) PyList_Append(list, reinterpret_cast<PyObject*>(s));
  return list;
}

static PyObject* py_lose(PyObject*, PyObject* o) {
  auto* c = reinterpret_cast<Cell*>(o);
  Py_INCREF(c);
  c->lost = true;
  cut(c, true, false, nullptr);
  if (c->handles == 0) release_strong(c);
  deferred_decref(reinterpret_cast<PyObject*>(c));
  Py_RETURN_NONE;
}

static PyObject* py_cut_children(PyObject*, PyObject* o) {
  auto* c = reinterpret_cast<Cell*>(o);
  cut(c, false, false, nullptr);
  Py_RETURN_NONE;
}

static PyObject* py_drop_recipe(PyObject*, PyObject* o) {
  auto* c = reinterpret_cast<Cell*>(o);
  drop_recipe(c);
  if (c->names > 0) hold(c);
  Py_RETURN_NONE;
}

// End of a pass: what nobody saved and no recipe names needs no recipe; dead storages leave the table.
static PyObject* py_end_pass(PyObject*, PyObject*) {
  note_end_of_pass();
  settle();
  sweep();
  // Dropping one recipe may leave its inputs unnamed, so go on until nothing changes; each round shortens the chains.
  bool changed = true;
  while (changed) {
    changed = false;
    std::vector<Cell*> cells;
    for (auto& [s, c] : g.table)
      if (c->recipe && c->handles == 0 && c->names == 0) {
        Py_INCREF(c);
        cells.push_back(c);
      }
    for (Cell* c : cells) {
      changed = true;
      drop_recipe(c);
      deferred_decref(reinterpret_cast<PyObject*>(c));
    }
  }
  sweep();
  Py_RETURN_NONE;
}

// forget_recipes(): writes went unwatched for a while, so no recipe from before may run any more.
static PyObject* py_forget_recipes(PyObject*, PyObject*) {
  settle();
  std::vector<Cell*> cells;
  for (auto& [s, c] : g.table) {
    Py_INCREF(c);
    cells.push_back(c);
  }
  for (Cell* c : cells)
    if (c->recipe && c->gone != EVICTED) drop_recipe(c);
  for (Cell* c : cells) deferred_decref(reinterpret_cast<PyObject*>(c));
  Py_RETURN_NONE;
}

static PyObject* py_table(PyObject*, PyObject*) {
  PyObject* list = PyList_New(0);
  for (auto& [s, c] : g.table) PyList_Append(list, reinterpret_cast<PyObject*>(c));
  return list;
}

// Entries whose cell is watched in another storage. There are none: see watch_in().
static PyObject* py_misplaced(PyObject*, PyObject*) {
  long found = 0;
  for (auto& [s, c] : g.table) found += c->weak._unsafe_get_target() != s;
  return PyLong_FromLong(found);
}

// The roots that are held only because recipes name them.
static PyObject* py_kept_roots(PyObject*, PyObject*) {
  PyObject* list = PyList_New(0);
  for (auto& [s, c] : g.table)
    if (c->strong && c->handles == 0 && c->names > 0 && c->gone == PRESENT && c->strong.use_count() == 1)
      PyList_Append(list, reinterpret_cast<PyObject*>(c));
  g.kept_new_bytes = 0;
  return list;
}

static PyObject* py_forget_all(PyObject*, PyObject*) {
  settle();
  std::vector<Cell*> cells;
  for (auto& [s, c] : g.table) cells.push_back(c);
  g.table.clear();
  g.table.rehash(0);  // a sweep a few buckets at a time must come round
  for (Cell* c : cells) {
    if (c->recipe && c->gone == PRESENT) drop_recipe(c);
    deferred_decref(reinterpret_cast<PyObject*>(c));
  }
  std::lock_guard<std::mutex> lock(g.mu);
  for (Cell* c : g.armed)
    if (c) c->armed = KEEP;
  g.armed.clear();
  g.armed_next = 0;
  g.armed_bytes = 0;
  Py_RETURN_NONE;
}

// handled() -> all cells with handles, oldest save first.
static PyObject* py_handled(PyObject*, PyObject*) {
  std::vector<Cell*> cells;
  {
    std::lock_guard<std::mutex> lock(g.mu);
    for (Cell* c = g.oldest; c; c = c->next) cells.push_back(c);
  }
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(cells.size()));
  if (!list) return nullptr;
  for (size_t i = 0; i < cells.size(); ++i) {
    Py_INCREF(cells[i]);
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), reinterpret_cast<PyObject*>(cells[i]));
  }
  return list;
}

}  // namespace memmgr
