// Cells, recipes and refs as Python objects, and the table that finds the cell of a storage.
#include "shim.h"

#include <time.h>

namespace at {
class TensorBase;
}
// libtorch_python exports these; its own header costs seven seconds of compile time.
extern PyObject* THPVariable_Wrap(const at::TensorBase& var);
extern PyObject* THPVariableClass;

namespace memmgr {

static int payload_offset = 0;  // of the TensorImpl pointer inside a Python tensor; found at start-up

// ---- tensors -------------------------------------------------------------------------------------------------------

c10::TensorImpl* impl_of(PyObject* o) {
  PyTypeObject* type = Py_TYPE(o);
  if (type == &PyLong_Type || type == &PyFloat_Type || type == &PyBool_Type || o == Py_None) return nullptr;
  if (type != reinterpret_cast<PyTypeObject*>(THPVariableClass) &&
      !PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(THPVariableClass)))
    return nullptr;
  c10::TensorImpl* impl;
  std::memcpy(&impl, reinterpret_cast<char*>(o) + payload_offset, sizeof impl);
  return impl;
}

// What a ref can describe: dense strided memory on a device, and nothing that carries more than sizes and strides.
bool is_plain(const c10::TensorImpl* t) {
  if (!t->has_storage() || t->is_python_dispatch() || t->has_symbolic_sizes_strides()) return false;
  const c10::DispatchKeySet k = t->key_set();
  using K = c10::DispatchKey;
  if (k.has(K::FuncTorchBatched) || k.has(K::FuncTorchGradWrapper) || k.has(K::Functionalize) || k.has(K::ZeroTensor))
    return false;
  if (!k.has_any(c10::DispatchKeySet(c10::BackendComponent::CPUBit) | c10::DispatchKeySet(c10::BackendComponent::CUDABit) |
                 c10::DispatchKeySet(c10::BackendComponent::PrivateUse1Bit)))
    return false;
  return k.has(K::Dense) && t->layout() == c10::kStrided && !t->is_quantized() && !t->is_nested();
}

PyObject* wrap(c10::intrusive_ptr<c10::TensorImpl> t) {
  // A TensorBase is one intrusive_ptr<TensorImpl, UndefinedTensorImpl>: the same pointer.
  static_assert(sizeof(t) == sizeof(void*));
  return THPVariable_Wrap(reinterpret_cast<const at::TensorBase&>(t));
}

c10::intrusive_ptr<c10::TensorImpl> tensor_of(const Ref* r, StorageRef storage) {
  auto t = c10::make_intrusive<c10::TensorImpl>(c10::Storage(std::move(storage)), r->keys, r->dtype);
  t->set_sizes_and_strides(r->sizes, r->strides, r->offset);
  return t;
}

static const void* counter_identity(const c10::VariableVersion& v) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
  const void* p;
  std::memcpy(&p, &v, sizeof p);
  return p;
}

// ---- the life of a cell ----------------------------------------------------------------------------------------------

// Recipes and cells form chains as long as a pass. Their ends are taken one after the other, not inside one another.
static std::vector<PyObject*> dying;
static bool burying = false;

void deferred_decref(PyObject* o) {
  if (!o) return;
  dying.push_back(o);
  if (burying) return;
  burying = true;
  while (!dying.empty()) {
    PyObject* next = dying.back();
    dying.pop_back();
    Py_DECREF(next);
  }
  burying = false;
}

static Cell* new_cell() {
  auto* c = reinterpret_cast<Cell*>(CellType.tp_alloc(&CellType, 0));
  if (!c) return nullptr;
  new (&c->strong) StorageRef();
  new (&c->weak) WeakStorage(StorageRef());
  new (&c->versions) std::vector<Version>();
  new (&c->incoming) at::DataPtr();
  c->slot = -1;
  c->seq = -1;
  return c;
}

static void wait_not_busy(Cell* c) {
  std::unique_lock<std::mutex> lock(g.mu);
  while (c->busy) {  // a copy of a few milliseconds, made by a thread that does not need the GIL
    lock.unlock();
    timespec t{0, 20000};
    nanosleep(&t, nullptr);
    lock.lock();
  }
}

static void drop_slot(Cell* c) {
  mm_slot slot;
  at::DataPtr incoming;
  {
    std::lock_guard<std::mutex> lock(g.mu);
    slot = c->slot;
    c->slot = -1;
    c->slot_state = NO_SLOT;
    incoming = take_incoming_locked(c);
  }
  if (slot >= 0 && g.tier) mm_tier_free(g.tier, slot);  // waits for what is under way, so `incoming` may go after it
}

// Our reference goes; with it the bytes, if nobody else has them.
static void release_strong(Cell* c) {
  if (c->busy) wait_not_busy(c);
  StorageRef s;
  {
    std::lock_guard<std::mutex> lock(g.mu);
    s = std::move(c->strong);
    c->strong.reset();
    disarm_locked(c);
  }
}

static void hold(Cell* c) {
  if (c->strong) return;
  StorageRef s = c->weak.lock();
  if (!s) return;
  std::lock_guard<std::mutex> lock(g.mu);
  c->strong = std::move(s);
}

static bool is_present(Cell* c) {
  if (c->gone != PRESENT) return false;
  if (c->strong) return data_present(c->strong.get());
  StorageRef s = c->weak.lock();
  return s && data_present(s.get());
}

static void note_gone_over(Cell* c) {  // a gone cell is wanted no more, or has its bytes again
  if (c->gone == OFFLOADED) g.offloaded_cells--;
  if (c->gone != PRESENT) {
    g.gone_bytes -= std::min<uint64_t>(g.gone_bytes, c->nbytes);
    if (g.arena) mm_arena_note_virtual(g.arena, -c->nbytes);
  }
}

static void add_handle(Cell* c) {
  if (c->handles++ > 0) return;
  if (c->seq < 0) c->seq = g.next_seq++;
  hold(c);
  std::lock_guard<std::mutex> lock(g.mu);
  c->prev = g.newest;
  c->next = nullptr;
  (g.newest ? g.newest->next : g.oldest) = c;
  g.newest = c;
  c->listed = true;
  if (c->gone == PRESENT) g.handled_bytes += static_cast<uint64_t>(c->nbytes);
  else {
    g.gone_bytes += static_cast<uint64_t>(c->nbytes);
  }
}

static void remove_handle(Cell* c) {
  if (--c->handles > 0) return;
  if (c->busy) wait_not_busy(c);
  {
    std::lock_guard<std::mutex> lock(g.mu);
    if (c->listed) {
      (c->prev ? c->prev->next : g.oldest) = c->next;
      (c->next ? c->next->prev : g.newest) = c->prev;
      c->prev = c->next = nullptr;
      c->listed = false;
      if (c->gone == PRESENT) g.handled_bytes -= std::min<uint64_t>(g.handled_bytes, c->nbytes);
    }
    disarm_locked(c);
  }
  const bool root_in_use = !c->recipe && c->names > 0;
  if (c->gone != PRESENT) {
    // Gone and unwanted. A root that recipes still need keeps its copy below; the rest is forgotten.
    if (root_in_use && c->slot >= 0) return;
    {
      std::lock_guard<std::mutex> lock(g.mu);
      note_gone_over(c);
      c->gone = PRESENT;  // present nowhere: weak is expired as soon as the shell goes
    }
    drop_slot(c);
    release_strong(c);
    if (g.tier_doomed) close_doomed_tier();
    return;
  }
  drop_slot(c);
  if (!root_in_use) release_strong(c);
}

static void unlink(Link* l) {
  Cell* c = l->cell;
  (l->prev ? l->prev->next : c->named_by) = l->next;
  if (l->next) l->next->prev = l->prev;
  c->names--;
  if (c->names == 0 && c->handles == 0) {
    if (c->gone != PRESENT) {
      std::lock_guard<std::mutex> lock(g.mu);
      note_gone_over(c);
      c->gone = PRESENT;
    }
    drop_slot(c);
    release_strong(c);
  }
  l->cell = nullptr;
  deferred_decref(reinterpret_cast<PyObject*>(c));
}

static void link_input(Recipe* r, Link* l, Cell* c) {
  Py_INCREF(c);
  l->recipe = r;
  l->cell = c;
  l->prev = nullptr;
  l->next = c->named_by;
  if (c->named_by) c->named_by->prev = l;
  c->named_by = l;
  if (c->names++ == 0 && !c->recipe && !c->strong) {
    hold(c);
    g.kept_new_bytes += static_cast<uint64_t>(c->nbytes);
  }
}

static void drop_recipe(Cell* c) {
  Recipe* r = c->recipe;
  if (!r) return;
  c->recipe = nullptr;
  for (Cell*& out : r->outputs)
    if (out == c) out = nullptr;
  deferred_decref(reinterpret_cast<PyObject*>(r));
}

// `c` can no longer be made again. If its bytes exist it becomes a root; otherwise what depends on it is cut as well.
// Returns in `stranded` the wanted cells that would be lost; with dry_run nothing is changed.
static void cut(Cell* first, bool itself, bool dry_run, std::vector<Cell*>* stranded) {
  std::vector<Cell*> work{first};
  const uint32_t stamp = ++g.stamp;
  bool head = true;
  while (!work.empty()) {
    Cell* c = work.back();
    work.pop_back();
    const bool only_children = head && !itself;
    head = false;
    if (!only_children) {
      if (!dry_run && c != first) drop_recipe(c);
      const bool has_bytes = c != first && (is_present(c) || c->slot >= 0);
      if (has_bytes) {
        if (!dry_run && c->names > 0) {
          hold(c);
          g.kept_new_bytes += static_cast<uint64_t>(c->nbytes);
        }
        continue;
      }
      if (c != first && c->handles > 0 && stranded) stranded->push_back(c);
      if (!dry_run && c != first) c->lost = true;
    }
    // Children: collect first, since dropping a recipe changes the list.
    std::vector<Recipe*> recipes;
    for (Link* l = c->named_by; l; l = l->next)
      if (l->recipe->ok && l->recipe->stamp != stamp) {
        l->recipe->stamp = stamp;
        recipes.push_back(l->recipe);
      }
    for (Recipe* r : recipes) {
      if (!dry_run) r->ok = false;
      for (Cell* out : r->outputs)
        if (out && out->stamp != stamp) {
          out->stamp = stamp;
          if (!dry_run) Py_INCREF(out);
          work.push_back(out);
        }
    }
    if (!dry_run && c != first) deferred_decref(reinterpret_cast<PyObject*>(c));
  }
}

// ---- the table -------------------------------------------------------------------------------------------------------

static void table_erase(std::unordered_map<c10::StorageImpl*, Cell*>::iterator it) {
  Cell* c = it->second;
  g.table.erase(it);
  deferred_decref(reinterpret_cast<PyObject*>(c));
}

void sweep() {
  std::vector<c10::StorageImpl*> dead;
  for (auto& [s, c] : g.table)
    if (c->weak.expired() && !c->strong) dead.push_back(s);
  for (auto* s : dead) {
    auto it = g.table.find(s);
    if (it != g.table.end()) table_erase(it);
  }
  g.sweep_at = std::max<size_t>(4096, g.table.size() * 2);
}

static void enter(c10::StorageImpl* s, Cell* c) {
  auto [it, fresh] = g.table.try_emplace(s, c);
  Py_INCREF(c);
  if (!fresh) {
    Cell* old = it->second;
    it->second = c;
    deferred_decref(reinterpret_cast<PyObject*>(old));
  }
  if (g.table.size() > g.sweep_at) sweep();
}

static void see_version(Cell* c, c10::TensorImpl* t) {
  if (t->is_inference()) return;
  c->versions.push_back({t->version_counter(), t->version_counter().current_version()});
}

void settle() {
  // What the last in-place op wrote has its new version by now (ADInplaceOrView counts after the kernel, and the kernel
  // is what the mode sees).
  if (g.unsettled.empty()) return;
  std::vector<Cell*> cells;
  cells.swap(g.unsettled);
  for (Cell* c : cells) {
    {
      std::lock_guard<std::mutex> lock(g.mu);
      for (Version& v : c->versions) v.at = v.counter.current_version();
      c->unsettled = false;
    }
    deferred_decref(reinterpret_cast<PyObject*>(c));
  }
}

// The cell of the tensor's storage as it is now, or null when the storage is unknown or was written unseen.
Cell* find_cell(c10::TensorImpl* t) {
  c10::StorageImpl* s = t->unsafe_storage().unsafeGetStorageImpl();
  auto it = g.table.find(s);
  if (it == g.table.end()) return nullptr;
  Cell* c = it->second;
  if (c->weak.expired() && !c->strong) {
    table_erase(it);
    return nullptr;
  }
  if (t->is_inference()) return c;
  const void* id = counter_identity(t->version_counter());
  bool known = false, moved = false;
  for (Version& v : c->versions) {
    if (v.counter.current_version() != v.at) moved = true;
    if (counter_identity(v.counter) == id) known = true;
  }
  if (static_cast<int64_t>(s->nbytes()) != c->nbytes) moved = true;  // resized: a write (rule 3)
  if (moved) return nullptr;
  if (!known) see_version(c, t);
  return c;
}

// A write that nobody announced was noticed: the cell of this storage is no longer what it was.
static void written_unseen(c10::TensorImpl* t) {
  c10::StorageImpl* s = t->unsafe_storage().unsafeGetStorageImpl();
  auto it = g.table.find(s);
  if (it == g.table.end()) return;
  Cell* c = it->second;
  Py_INCREF(c);
  if (c->names > 0 && !c->recipe) {
    c->lost = true;
    cut(c, true, false, nullptr);
  }
  if (c->handles > 0) {
    c->stale = true;  // versions_current() says so too; kept for the message
  } else {
    std::lock_guard<std::mutex> lock(g.mu);
    c->strong.reset();
    disarm_locked(c);
  }
  c->weak = WeakStorage(StorageRef());
  it = g.table.find(s);
  if (it != g.table.end()) table_erase(it);
  deferred_decref(reinterpret_cast<PyObject*>(c));
}

static Cell* make_cell(c10::TensorImpl* t) {
  Cell* c = new_cell();
  if (!c) return nullptr;
  StorageRef s = storage_of(t);
  c->weak = WeakStorage(s);
  c->nbytes = static_cast<int64_t>(s->nbytes());
  c->last_access = g.clock;
  see_version(c, t);
  // Memory that another library owns may be written by it at any time.
  c->exposed = !s->resizable();
  return c;
}

Cell* lookup_cell(c10::TensorImpl* t) {
  Cell* c = find_cell(t);
  if (c) return c;
  written_unseen(t);
  c = make_cell(t);
  if (!c) return nullptr;
  enter(t->unsafe_storage().unsafeGetStorageImpl(), c);
  Py_DECREF(c);  // the table has it
  return c;
}

// ---- bytes come back -------------------------------------------------------------------------------------------------

// Reloads an offloaded cell, or says that it wants recomputation. The GIL is held; it is dropped while waiting.
bool bring_back(Cell* c, bool* recompute) {
  *recompute = false;
  if (c->busy) wait_not_busy(c);
  if (c->gone == PRESENT && is_present(c)) return true;
  if (c->gone != OFFLOADED) {
    *recompute = true;
    return true;
  }
  const uint64_t t0 = now_ns();
  int rc = 0;
  const mm_slot slot = c->slot;
  mm_tier* tier = g.tier;
  at::DataPtr bytes;
  std::string oom;
  {
    std::lock_guard<std::mutex> lock(g.mu);
    c->busy = true;
    bytes = take_incoming_locked(c);
  }
  const bool prefetched = bytes.get() != nullptr;
  const auto n = static_cast<size_t>(c->nbytes);
  c10::Allocator* allocator = c10::GetAllocator(c10::kCPU);
  Py_BEGIN_ALLOW_THREADS
  if (prefetched) {
    rc = mm_tier_wait(tier, slot);
  } else {
    try {
      bytes = allocator->allocate(n);
    } catch (const std::exception& e) {
      oom = e.what();
    }
    if (oom.empty()) rc = mm_tier_read_now(tier, slot, bytes.get());
  }
  Py_END_ALLOW_THREADS
  if (!oom.empty() || rc < 0) {
    std::lock_guard<std::mutex> lock(g.mu);
    c->busy = false;
  }
  if (!oom.empty()) {
    PyObject* torch = PyImport_ImportModule("torch");
    PyObject* type = torch ? PyObject_GetAttrString(torch, "OutOfMemoryError") : nullptr;
    const size_t line = oom.find('\n');
    PyErr_SetString(type ? type : PyExc_MemoryError, oom.substr(0, line).c_str());
    Py_XDECREF(type);
    Py_XDECREF(torch);
    return false;
  }
  if (rc < 0) {
    g.n.tier_errors++;
    if (c->recipe && c->recipe->ok) {
      // The copy cannot be read, but the bytes can be made again.
      {
        std::lock_guard<std::mutex> lock(g.mu);
        g.offloaded_cells--;
        c->gone = EVICTED;
      }
      drop_slot(c);
      *recompute = true;
      return true;
    }
    PyErr_Format(PyExc_OSError, "memmgr: reading a saved tensor back from the disk tier failed: %s", std::strerror(-rc));
    return false;
  }
  if (c->has_checksum && !c->exposed) {
    const uint64_t got = checksum_bytes(bytes.get(), n);
    c->has_checksum = false;
    if (got != c->checksum) {
      std::lock_guard<std::mutex> lock(g.mu);
      c->busy = false;
      PyErr_Format(PyExc_RuntimeError, "memmgr: %zu bytes came back from the tier below other than they went (%s, slot %lld)", n,
                   prefetched ? "prefetched" : "read when needed", static_cast<long long>(slot));
      return false;
    }
  }
  {
    std::lock_guard<std::mutex> lock(g.mu);
    note_gone_over(c);
    c->gone = PRESENT;
    c->strong->set_data_ptr_noswap(std::move(bytes));
    if (c->listed) g.handled_bytes += static_cast<uint64_t>(c->nbytes);
    c->busy = false;
  }
  g.n.reloads++;
  g.n.reload_bytes += n;
  if (prefetched) g.n.prefetch_hits++;
  else g.n.prefetch_misses++;
  const uint64_t dt = now_ns() - t0;
  tl_stall_ns += dt;
  g.n.stall_ns += dt;
  return true;
}

// ---- Python types ----------------------------------------------------------------------------------------------------

static void Cell_dealloc(PyObject* self) {
  auto* c = reinterpret_cast<Cell*>(self);
  if (c->weakrefs) PyObject_ClearWeakRefs(self);
  drop_recipe(c);
  if (c->busy) wait_not_busy(c);
  drop_slot(c);
  release_strong(c);
  Py_CLEAR(c->note);
  c->strong.~StorageRef();
  c->weak.~WeakStorage();
  c->versions.~vector();
  c->incoming.~DataPtr();
  Py_TYPE(self)->tp_free(self);
}

static PyObject* Cell_present(PyObject* self, void*) { return PyBool_FromLong(is_present(reinterpret_cast<Cell*>(self))); }
static PyObject* Cell_recipe(PyObject* self, void*) {
  auto* r = reinterpret_cast<PyObject*>(reinterpret_cast<Cell*>(self)->recipe);
  if (!r) Py_RETURN_NONE;
  Py_INCREF(r);
  return r;
}
static PyObject* Cell_fresh(PyObject* self, void*) { return PyBool_FromLong(versions_current(reinterpret_cast<Cell*>(self))); }
static PyObject* Cell_use_count(PyObject* self, void*) {
  auto* c = reinterpret_cast<Cell*>(self);
  return PyLong_FromUnsignedLong(c->strong ? c->strong.use_count() : c->weak.use_count());
}
static PyObject* Cell_ours_alone(PyObject* self, void*) {
  std::lock_guard<std::mutex> lock(g.mu);
  return PyBool_FromLong(ours_alone_locked(reinterpret_cast<Cell*>(self)));
}
static PyObject* Cell_held(PyObject* self, void*) { return PyBool_FromLong(bool(reinterpret_cast<Cell*>(self)->strong)); }
static PyObject* Cell_checksum(PyObject* self, void*) {
  auto* c = reinterpret_cast<Cell*>(self);
  if (!c->has_checksum) Py_RETURN_NONE;
  return PyLong_FromUnsignedLongLong(c->checksum);
}

#define BOOL_FIELD(name)                                                                                   \
  static PyObject* Cell_get_##name(PyObject* self, void*) {                                                \
    return PyBool_FromLong(reinterpret_cast<Cell*>(self)->name);                                           \
  }                                                                                                        \
  static int Cell_set_##name(PyObject* self, PyObject* v, void*) {                                         \
    reinterpret_cast<Cell*>(self)->name = v && PyObject_IsTrue(v) == 1;                                    \
    return 0;                                                                                              \
  }
BOOL_FIELD(stale)
BOOL_FIELD(blank)
BOOL_FIELD(exposed)
BOOL_FIELD(lost)
BOOL_FIELD(managed)
BOOL_FIELD(pinned)
#undef BOOL_FIELD

static PyObject* Cell_num(PyObject* self, void* which) {
  auto* c = reinterpret_cast<Cell*>(self);
  switch (reinterpret_cast<intptr_t>(which)) {
    case 0: return PyLong_FromLongLong(c->nbytes);
    case 1: return PyLong_FromLongLong(c->seq);
    case 2: return PyLong_FromLongLong(c->slot);
    case 3: return PyFloat_FromDouble(c->cost);
    case 4: return PyFloat_FromDouble(c->last_access);
    case 5: return PyLong_FromLong(c->handles);
    case 6: return PyLong_FromLong(c->names);
    case 7: return PyLong_FromLong(c->gone);
    default: return PyBool_FromLong(c->incoming.get() != nullptr);
  }
}
static PyObject* Cell_get_note(PyObject* self, void*) {
  PyObject* n = reinterpret_cast<Cell*>(self)->note;
  if (!n) Py_RETURN_NONE;
  Py_INCREF(n);
  return n;
}
static int Cell_set_note(PyObject* self, PyObject* v, void*) {
  Py_XINCREF(v);
  Py_XSETREF(reinterpret_cast<Cell*>(self)->note, v);
  return 0;
}

static PyGetSetDef Cell_getset[] = {
    {"present", Cell_present, nullptr, "the bytes are in memory", nullptr},
    {"recipe", Cell_recipe, nullptr, nullptr, nullptr},
    {"fresh", Cell_fresh, nullptr, "no version counter moved since the cell was seen", nullptr},
    {"use_count", Cell_use_count, nullptr, nullptr, nullptr},
    {"ours_alone", Cell_ours_alone, nullptr, nullptr, nullptr},
    {"held", Cell_held, nullptr, "we hold the storage", nullptr},
    {"checksum", Cell_checksum, nullptr, nullptr, nullptr},
    {"stale", Cell_get_stale, Cell_set_stale, nullptr, nullptr},
    {"blank", Cell_get_blank, Cell_set_blank, nullptr, nullptr},
    {"exposed", Cell_get_exposed, Cell_set_exposed, nullptr, nullptr},
    {"lost", Cell_get_lost, Cell_set_lost, nullptr, nullptr},
    {"managed", Cell_get_managed, Cell_set_managed, nullptr, nullptr},
    {"pinned", Cell_get_pinned, Cell_set_pinned, nullptr, nullptr},
    {"nbytes", Cell_num, nullptr, nullptr, (void*)0},
    {"seq", Cell_num, nullptr, nullptr, (void*)1},
    {"slot", Cell_num, nullptr, nullptr, (void*)2},
    {"cost", Cell_num, nullptr, nullptr, (void*)3},
    {"last_access", Cell_num, nullptr, nullptr, (void*)4},
    {"handles", Cell_num, nullptr, nullptr, (void*)5},
    {"names", Cell_num, nullptr, nullptr, (void*)6},
    {"gone", Cell_num, nullptr, nullptr, (void*)7},
    {"arriving", Cell_num, nullptr, nullptr, (void*)8},
    {"note", Cell_get_note, Cell_set_note, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject CellType = {PyVarObject_HEAD_INIT(nullptr, 0)};

static void Recipe_dealloc(PyObject* self) {
  auto* r = reinterpret_cast<Recipe*>(self);
  for (Cell* out : r->outputs)
    if (out && out->recipe == r) out->recipe = nullptr;
  for (int i = 0; i < r->nlinks; ++i)
    if (r->links[i].cell) unlink(&r->links[i]);
  delete[] r->links;
  r->outputs.~vector();
  deferred_decref(r->args);
  deferred_decref(r->kwargs);
  Py_XDECREF(r->rng);
  Py_XDECREF(r->special);
  Py_XDECREF(r->func);
  Py_TYPE(self)->tp_free(self);
}
static PyObject* obj_or_none(PyObject* o) {
  if (!o) Py_RETURN_NONE;
  Py_INCREF(o);
  return o;
}
static PyObject* Recipe_get(PyObject* self, void* which) {
  auto* r = reinterpret_cast<Recipe*>(self);
  switch (reinterpret_cast<intptr_t>(which)) {
    case 0: return obj_or_none(r->func);
    case 1: return obj_or_none(r->args);
    case 2: return obj_or_none(r->kwargs);
    case 3: return obj_or_none(r->rng);
    case 4: return obj_or_none(r->special);
    case 5: {
      PyObject* t = PyTuple_New(r->nlinks);
      for (int i = 0; t && i < r->nlinks; ++i) {
        PyObject* c = r->links[i].cell ? reinterpret_cast<PyObject*>(r->links[i].cell) : Py_None;
        Py_INCREF(c);
        PyTuple_SET_ITEM(t, i, c);
      }
      return t;
    }
    case 6: {
      PyObject* t = PyTuple_New(static_cast<Py_ssize_t>(r->outputs.size()));
      for (size_t i = 0; t && i < r->outputs.size(); ++i) {
        PyObject* c = r->outputs[i] ? reinterpret_cast<PyObject*>(r->outputs[i]) : Py_None;
        Py_INCREF(c);
        PyTuple_SET_ITEM(t, static_cast<Py_ssize_t>(i), c);
      }
      return t;
    }
    case 7: return PyLong_FromLong(r->env);
    case 8: return PyFloat_FromDouble(r->cost);
    case 9: return PyBool_FromLong(r->ok);
    case 11: return PyLong_FromUnsignedLongLong(r->kind ? r->kind->hash : 0);
    default: return PyLong_FromLong(r->kind ? r->kind->trust.load() : 0);
  }
}
static int Recipe_set_object(PyObject* self, PyObject* v, void* which) {
  auto* r = reinterpret_cast<Recipe*>(self);
  PyObject*& field = reinterpret_cast<intptr_t>(which) == 3 ? r->rng : r->special;
  if (v == Py_None) v = nullptr;
  Py_XINCREF(v);
  Py_XSETREF(field, v);
  return 0;
}
static int Recipe_set_ok(PyObject* self, PyObject* v, void*) {
  reinterpret_cast<Recipe*>(self)->ok = PyObject_IsTrue(v) == 1;
  return 0;
}
static int Recipe_set_trust(PyObject* self, PyObject* v, void*) {
  auto* r = reinterpret_cast<Recipe*>(self);
  if (r->kind) r->kind->trust.store(static_cast<uint8_t>(PyLong_AsLong(v)));
  return 0;
}
static PyGetSetDef Recipe_getset[] = {
    {"func", Recipe_get, nullptr, nullptr, (void*)0},
    {"args", Recipe_get, nullptr, nullptr, (void*)1},
    {"kwargs", Recipe_get, nullptr, nullptr, (void*)2},
    {"rng", Recipe_get, Recipe_set_object, nullptr, (void*)3},
    {"special", Recipe_get, Recipe_set_object, nullptr, (void*)4},
    {"inputs", Recipe_get, nullptr, nullptr, (void*)5},
    {"outputs", Recipe_get, nullptr, nullptr, (void*)6},
    {"env", Recipe_get, nullptr, nullptr, (void*)7},
    {"cost", Recipe_get, nullptr, nullptr, (void*)8},
    {"ok", Recipe_get, Recipe_set_ok, nullptr, (void*)9},
    {"trust", Recipe_get, Recipe_set_trust, nullptr, (void*)10},
    {"kind", Recipe_get, nullptr, "hash of op, shapes, dtypes, strides, flags and circumstances (rule 7)", (void*)11},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyTypeObject RecipeType = {PyVarObject_HEAD_INIT(nullptr, 0)};

static void Ref_dealloc(PyObject* self) {
  auto* r = reinterpret_cast<Ref*>(self);
  if (r->cell) {
    if (r->handle) remove_handle(r->cell);
    deferred_decref(reinterpret_cast<PyObject*>(r->cell));
  }
  r->sizes.~SmallVector();
  r->strides.~SmallVector();
  Py_TYPE(self)->tp_free(self);
}
static PyObject* Ref_cell(PyObject* self, void*) { return obj_or_none(reinterpret_cast<PyObject*>(reinterpret_cast<Ref*>(self)->cell)); }
static PyObject* Ref_mutated(PyObject* self, void*) { return PyBool_FromLong(reinterpret_cast<Ref*>(self)->mutated); }
static int Ref_set_mutated(PyObject* self, PyObject* v, void*) {
  reinterpret_cast<Ref*>(self)->mutated = PyObject_IsTrue(v) == 1;
  return 0;
}
static PyGetSetDef Ref_getset[] = {{"cell", Ref_cell, nullptr, nullptr, nullptr},
                                   {"mutated", Ref_mutated, Ref_set_mutated, nullptr, nullptr},
                                   {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyTypeObject RefType = {PyVarObject_HEAD_INIT(nullptr, 0)};

Ref* make_ref(c10::TensorImpl* t, Cell* c, bool handle) {
  auto* r = reinterpret_cast<Ref*>(RefType.tp_alloc(&RefType, 0));
  if (!r) return nullptr;
  new (&r->sizes) c10::SmallVector<int64_t, 5>(t->sizes().begin(), t->sizes().end());
  new (&r->strides) c10::SmallVector<int64_t, 5>(t->strides().begin(), t->strides().end());
  r->offset = t->storage_offset();
  new (&r->dtype) caffe2::TypeMeta(t->dtype());
  new (&r->keys) c10::DispatchKeySet(t->key_set());
  Py_INCREF(c);
  r->cell = c;
  r->mutated = false;
  r->handle = handle;
  if (handle) add_handle(c);
  return r;
}

// ---- functions -------------------------------------------------------------------------------------------------------

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

// The ref as a tensor over `storage_owner`'s storage (default: the cell's own). The bytes must be present.
static PyObject* py_tensor(PyObject*, PyObject* args) {
  PyObject *ro, *owner = Py_None;
  if (!PyArg_ParseTuple(args, "O!|O", &RefType, &ro, &owner)) return nullptr;
  auto* r = reinterpret_cast<Ref*>(ro);
  StorageRef s;
  if (owner != Py_None) {
    c10::TensorImpl* t = impl_of(owner);
    if (!t) return PyErr_Format(PyExc_TypeError, "not a tensor");
    s = storage_of(t);
  } else {
    std::lock_guard<std::mutex> lock(g.mu);
    s = r->cell->strong ? r->cell->strong : r->cell->weak.lock();
  }
  if (!s || !data_present(s.get())) return PyErr_Format(PyExc_RuntimeError, "memmgr: the cell's bytes are not in memory");
  if (s->nbytes() < static_cast<size_t>(r->cell->nbytes))
    return PyErr_Format(PyExc_RuntimeError, "memmgr: a storage shrank under a saved view");
  r->cell->last_access = g.clock;
  return wrap(tensor_of(r, std::move(s)));
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
  // The shell that the bytes left may still be the key of this cell.
  StorageRef shell = c->strong ? c->strong : c->weak.lock();
  if (shell) {
    auto it = g.table.find(shell.get());
    if (it != g.table.end() && it->second == c && shell.get() != s.get()) table_erase(it);
  }
  {
    std::lock_guard<std::mutex> lock(g.mu);
    note_gone_over(c);
    if (c->listed && c->gone != PRESENT) g.handled_bytes += static_cast<uint64_t>(c->nbytes);
    c->gone = PRESENT;
    if (c->handles > 0 || (!c->recipe && c->names > 0)) c->strong = s;
    else c->strong.reset();
    c->weak = WeakStorage(s);
    c->versions.clear();
    c->versions.push_back({t->version_counter(), t->version_counter().current_version()});
    c->has_checksum = false;
    c->last_access = g.clock;
  }
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
  if (s->device_type() != c10::DeviceType::CPU || !data_present(s)) Py_RETURN_NONE;
  const void* p = s->_mutable_data_ptr_no_checks().get();
  const size_t n = s->nbytes();
  uint64_t h;
  Py_BEGIN_ALLOW_THREADS
  h = checksum_bytes(p, n);
  Py_END_ALLOW_THREADS
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
  if (old && ro == Py_None && old->handles == 0 && old->names == 0) {
    table_erase(it);  // nobody asks for the old bytes and nobody can make the new ones: forget it
    Py_RETURN_NONE;
  }
  if (!old && ro == Py_None) Py_RETURN_NONE;
  if (old) {
    Py_INCREF(old);
    if (old->names > 0 && !old->recipe) {
      old->lost = true;
      cut(old, true, false, nullptr);
    }
    bool same_counter = t->is_inference();
    if (!same_counter) {
      const void* id = counter_identity(t->version_counter());
      for (Version& v : old->versions) same_counter |= counter_identity(v.counter) == id;
    }
    if (old->handles > 0 && !same_counter) {
      // A write through `.data` or the like: autograd's own saved tensor would not notice and would read the new bytes.
      // So the cell stays, with new bytes: what was made from the old ones is cut off, and it has no recipe any more.
      if (old->recipe) {
        cut(old, false, false, nullptr);
        drop_recipe(old);
      }
      Py_DECREF(old);
      Py_RETURN_NONE;
    }
    if (old->handles > 0) old->stale = true;
    {
      std::lock_guard<std::mutex> lock(g.mu);
      if (old->listed && old->gone == PRESENT) {
        // Not among the bytes that could leave any more.
        g.handled_bytes -= std::min<uint64_t>(g.handled_bytes, old->nbytes);
        (old->prev ? old->prev->next : g.oldest) = old->next;
        (old->next ? old->next->prev : g.newest) = old->prev;
        old->prev = old->next = nullptr;
        old->listed = false;
      }
      disarm_locked(old);
    }
    drop_slot(old);
    release_strong(old);
    old->weak = WeakStorage(StorageRef());
    it = g.table.find(s);
    if (it != g.table.end()) table_erase(it);
    deferred_decref(reinterpret_cast<PyObject*>(old));
  }
  Cell* c = make_cell(t);
  if (!c) return nullptr;
  if (old && old->exposed) c->exposed = true;
  c->unsettled = true;
  Py_INCREF(c);
  g.unsettled.push_back(c);
  if (ro != Py_None) {
    auto* r = reinterpret_cast<Recipe*>(ro);
    Py_INCREF(r);
    c->recipe = r;
    c->cost = r->cost;
    r->outputs.push_back(c);
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
    const void* id = counter_identity(t->version_counter());
    bool same = false;
    for (Version& v : c->versions) same |= counter_identity(v.counter) == id;
    if (!same) cut(c, false, true, &stranded);
  }
  for (Cell* s : stranded) PyList_Append(list, reinterpret_cast<PyObject*>(s));
  return list;
}

// dependants(cell): the wanted cells that are gone and whose recomputation could read this cell's storage.
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

// The cost of what must run again before `c` can, ancestors that are not in memory included, each op once.
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
      if (!p || !p->recipe || p->recipe->stamp == stamp || p->slot >= 0 || is_present(p)) continue;
      p->recipe->stamp = stamp;
      sum += p->recipe->cost;
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
          sum += r->cost;
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
    cost[i] = c->cost;
    chain[i] = component[i] = 0;
    if (neighbours && c->recipe) {
      chain[i] = chain_cost(c, ++g.stamp, work);
      component[i] = chain[i] + children_cost(c, ++g.stamp, work2);
    }
    recomputable[i] = c->recipe && c->recipe->ok && c->recipe->kind && c->recipe->kind->trust.load() == TRUST_YES && !c->exposed;
    clean[i] = c->slot >= 0;
    seq[i] = c->seq;
  }
  return Py_BuildValue("(NNNNNNNNN)", list, bufs[0], bufs[1], bufs[2], bufs[3], bufs[4], bufs[5], bufs[6], bufs[7]);
}

// arm([(cell, action)]): the order in which cells leave when malloc needs room.
static PyObject* py_arm(PyObject*, PyObject* o) {
  PyObject* seq = PySequence_Fast(o, "a sequence of (cell, action)");
  if (!seq) return nullptr;
  std::lock_guard<std::mutex> lock(g.mu);
  if (g.armed_next >= g.armed.size()) {
    g.armed.clear();
    g.armed_next = 0;
  }
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(seq); ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(seq, i);
    auto* c = reinterpret_cast<Cell*>(PyTuple_GET_ITEM(item, 0));
    const auto action = static_cast<uint8_t>(PyLong_AsLong(PyTuple_GET_ITEM(item, 1)));
    if (action == KEEP || c->armed != KEEP || !c->listed) continue;
    c->armed = action;
    c->armed_at = static_cast<int64_t>(g.armed.size());
    g.armed.push_back(c);
    g.armed_bytes += static_cast<uint64_t>(c->nbytes);
  }
  Py_DECREF(seq);
  Py_RETURN_NONE;
}

static PyObject* py_disarm_all(PyObject*, PyObject*) {
  std::lock_guard<std::mutex> lock(g.mu);
  for (Cell* c : g.armed)
    if (c) c->armed = KEEP;
  g.armed.clear();
  g.armed_next = 0;
  g.armed_bytes = 0;
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
  Py_END_ALLOW_THREADS
  return PyBool_FromLong(done);
}

// write_back(cell) -> bool: queue an early copy of bytes that are ours alone.
static PyObject* py_write_back(PyObject*, PyObject* o) {
  auto* c = reinterpret_cast<Cell*>(o);
  std::lock_guard<std::mutex> lock(g.mu);
  if (!g.tier || c->slot >= 0 || !ours_alone_locked(c) || !versions_current(c)) Py_RETURN_FALSE;
  const mm_slot slot =
      mm_tier_write(g.tier, c->strong->_mutable_data_ptr_no_checks().get(), static_cast<uint64_t>(c->nbytes));
  if (slot < 0) {
    g.n.tier_errors++;
    g.tier_error = std::strerror(static_cast<int>(-slot));
    Py_RETURN_FALSE;
  }
  c->slot = slot;
  c->slot_state = WRITING;
  g.n.write_backs++;
  g.n.offloads++;
  g.n.offload_bytes += static_cast<uint64_t>(c->nbytes);
  Py_RETURN_TRUE;
}

// prefetch(cell, keep_free) -> 1 begun, 0 no room, -1 nothing to do.
static PyObject* py_prefetch(PyObject*, PyObject* args) {
  PyObject* co;
  unsigned long long keep_free;
  if (!PyArg_ParseTuple(args, "O!K", &CellType, &co, &keep_free)) return nullptr;
  auto* c = reinterpret_cast<Cell*>(co);
  if (c->gone != OFFLOADED || c->incoming.get() || c->busy || c->slot < 0 || !g.tier || !g.arena) return PyLong_FromLong(-1);
  void* p = mm_arena_try_alloc(g.arena, static_cast<size_t>(c->nbytes), keep_free);
  if (!p) return PyLong_FromLong(0);
  const at::Device cpu(at::DeviceType::CPU);
  
  at::DataPtr bytes(p, p, &arena_free, cpu);
  std::lock_guard<std::mutex> lock(g.mu);
  const int rc = mm_tier_read(g.tier, c->slot, p);
  if (rc < 0) return PyLong_FromLong(0);
  c->incoming = std::move(bytes);
  g.incoming_bytes += static_cast<uint64_t>(c->nbytes);
  return PyLong_FromLong(1);
}

static PyObject* py_clone_storage(PyObject*, PyObject* o) {
  // A private copy of the cell's bytes, for ops that write (rule 2); returned as a byte tensor.
  auto* c = reinterpret_cast<Cell*>(o);
  StorageRef src;
  {
    std::lock_guard<std::mutex> lock(g.mu);
    src = c->strong ? c->strong : c->weak.lock();
  }
  if (!src || !data_present(src.get())) return PyErr_Format(PyExc_RuntimeError, "memmgr: the cell's bytes are not in memory");
  c10::Allocator* a = c10::GetAllocator(src->device_type());
  StorageRef copy;
  std::string oom;
  Py_BEGIN_ALLOW_THREADS
  try {
    copy = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), src->nbytes(), a->allocate(src->nbytes()), a, true);
    std::memcpy(copy->_mutable_data_ptr_no_checks().get(), src->_mutable_data_ptr_no_checks().get(), src->nbytes());
  } catch (const std::exception& e) {
    oom = e.what();
  }
  Py_END_ALLOW_THREADS
  if (!oom.empty()) {
    PyObject* torch = PyImport_ImportModule("torch");
    PyObject* type = torch ? PyObject_GetAttrString(torch, "OutOfMemoryError") : nullptr;
    PyErr_SetString(type ? type : PyExc_MemoryError, oom.substr(0, oom.find('\n')).c_str());
    Py_XDECREF(type);
    Py_XDECREF(torch);
    return nullptr;
  }
  const auto n = static_cast<int64_t>(copy->nbytes());
  auto t = c10::make_intrusive<c10::TensorImpl>(c10::Storage(std::move(copy)), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                caffe2::TypeMeta::Make<uint8_t>());
  t->set_sizes_contiguous({n});
  return wrap(std::move(t));
}

// lease(cell) -> a byte tensor over the whole storage, or None when the bytes are not in memory. While it lives the cell
// is not ours alone, so it stays.
static PyObject* py_lease(PyObject*, PyObject* o) {
  auto* c = reinterpret_cast<Cell*>(o);
  StorageRef s;
  {
    std::lock_guard<std::mutex> lock(g.mu);
    if (c->gone == PRESENT) s = c->strong ? c->strong : c->weak.lock();
  }
  if (!s || !data_present(s.get())) Py_RETURN_NONE;
  const auto n = static_cast<int64_t>(s->nbytes());
  const auto keys = c10::DispatchKeySet(s->device_type() == c10::DeviceType::CUDA ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
  auto t = c10::make_intrusive<c10::TensorImpl>(c10::Storage(std::move(s)), keys, caffe2::TypeMeta::Make<uint8_t>());
  t->set_sizes_contiguous({n});
  return wrap(std::move(t));
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
  drop_recipe(c);  // what a raw write leaves there, no recipe makes
  if (c->names > 0) hold(c);
  c->exposed = true;
  if (c->names > 0 && !c->has_checksum && t->device_type() == c10::DeviceType::CPU) {
    auto* s = t->unsafe_storage().unsafeGetStorageImpl();
    c->checksum = checksum_bytes(s->_mutable_data_ptr_no_checks().get(), s->nbytes());
    c->has_checksum = true;
  }
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
  Py_BEGIN_ALLOW_THREADS
  void* p = nullptr;
  if (posix_memalign(&p, 4096, n) == 0) {
    std::memset(p, 1, n);
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
    free(p);
  } else {
    rc = -1;
  }
  Py_END_ALLOW_THREADS
  if (rc < 0) Py_RETURN_NONE;
  return Py_BuildValue("dd", static_cast<double>(t1 - t0) * 1e-9, static_cast<double>(t2 - t1) * 1e-9);
}

static PyObject* py_position(PyObject*, PyObject*) { return PyLong_FromLongLong(g.last_unpacked); }

static PyObject* py_set_no_reclaim(PyObject*, PyObject* o) {
  tl_no_reclaim = PyObject_IsTrue(o) == 1;
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
                       PyBool_FromLong(whole), PyBool_FromLong(g.arena && p && mm_arena_owns(g.arena, p)));
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
    {"lose", py_lose, METH_O, ""},
    {"cut_children", py_cut_children, METH_O, ""},
    {"drop_recipe", py_drop_recipe, METH_O, ""},
    {"end_pass", py_end_pass, METH_NOARGS, ""},
    {"forget_recipes", py_forget_recipes, METH_NOARGS, ""},
    {"table", py_table, METH_NOARGS, "all cells that are known by a storage"},
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
    {"lease", py_lease, METH_O, "keeps a cell's bytes in memory while the result lives"},
    {"expose", py_expose, METH_O, "a pointer to the tensor's memory was handed out"},
    {"offloaded", py_offloaded, METH_O, "(cells, position, bytes in flight)"},
    {"tier_probe", py_tier_probe, METH_O, ""},
    {"position", py_position, METH_NOARGS, "order of the save that was used last"},
    {"set_no_reclaim", py_set_no_reclaim, METH_O, ""},
    {"storage_info", py_storage_info, METH_O, ""},
    {nullptr, nullptr, 0, nullptr}};

static PyObject* no_new(PyTypeObject* type, PyObject*, PyObject*) {
  return PyErr_Format(PyExc_TypeError, "%s objects are made by memmgr", type->tp_name);
}

bool ready_types(PyObject* module) {
  CellType.tp_name = "memmgr._native.Cell";
  CellType.tp_basicsize = sizeof(Cell);
  CellType.tp_flags = Py_TPFLAGS_DEFAULT;
  CellType.tp_dealloc = Cell_dealloc;
  CellType.tp_getset = Cell_getset;
  CellType.tp_weaklistoffset = offsetof(Cell, weakrefs);
  CellType.tp_new = no_new;
  RecipeType.tp_name = "memmgr._native.Recipe";
  RecipeType.tp_basicsize = sizeof(Recipe);
  RecipeType.tp_flags = Py_TPFLAGS_DEFAULT;
  RecipeType.tp_dealloc = Recipe_dealloc;
  RecipeType.tp_getset = Recipe_getset;
  RecipeType.tp_new = no_new;
  RefType.tp_name = "memmgr._native.Ref";
  RefType.tp_basicsize = sizeof(Ref);
  RefType.tp_flags = Py_TPFLAGS_DEFAULT;
  RefType.tp_dealloc = Ref_dealloc;
  RefType.tp_getset = Ref_getset;
  RefType.tp_new = no_new;
  if (PyType_Ready(&CellType) < 0 || PyType_Ready(&RecipeType) < 0 || PyType_Ready(&RefType) < 0) return false;
  Py_INCREF(&CellType);
  Py_INCREF(&RecipeType);
  Py_INCREF(&RefType);
  return PyModule_AddObject(module, "Cell", reinterpret_cast<PyObject*>(&CellType)) == 0 &&
         PyModule_AddObject(module, "Recipe", reinterpret_cast<PyObject*>(&RecipeType)) == 0 &&
         PyModule_AddObject(module, "Ref", reinterpret_cast<PyObject*>(&RefType)) == 0;
}

// A Python tensor holds its TensorImpl at a place that differs between torch versions: compare with what torch says.
bool find_payload(PyObject* sample) {
  PyObject* address = PyObject_GetAttrString(sample, "_cdata");
  if (!address) return false;
  const auto want = static_cast<uintptr_t>(PyLong_AsUnsignedLongLong(address));
  Py_DECREF(address);
  for (int offset : {16, 24}) {
    uintptr_t word;
    std::memcpy(&word, reinterpret_cast<char*>(sample) + offset, sizeof word);
    if (word == want) {
      payload_offset = offset;
      return true;
    }
  }
  PyErr_SetString(PyExc_ImportError, "memmgr: this torch keeps its tensors in a layout that the shim does not know");
  return false;
}

Recipe* new_recipe(int nlinks) {
  auto* r = reinterpret_cast<Recipe*>(RecipeType.tp_alloc(&RecipeType, 0));
  if (!r) return nullptr;
  new (&r->outputs) std::vector<Cell*>();
  r->links = nlinks ? new Link[static_cast<size_t>(nlinks)]() : nullptr;
  r->nlinks = nlinks;
  return r;
}
void link_recipe_input(Recipe* r, int i, Cell* c) { link_input(r, &r->links[i], c); }
Cell* fresh_cell(c10::TensorImpl* t) {
  Cell* c = make_cell(t);
  if (c) enter(t->unsafe_storage().unsafeGetStorageImpl(), c);
  return c;
}
void discard_copy(Cell* c) { drop_slot(c); }
bool cell_present(Cell* c) { return is_present(c); }

}  // namespace memmgr
