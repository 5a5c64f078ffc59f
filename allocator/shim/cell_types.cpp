// Cells, recipes and refs as Python sees them.
#include <ATen/core/VariableHooksInterface.h>

#include "shim.h"

namespace memmgr {

// ---- Python types ----

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

static PyObject* Cell_present(PyObject* self, void*) {
  return PyBool_FromLong(is_present(reinterpret_cast<Cell*>(self)));
}
static PyObject* Cell_stored(PyObject* self, void*) {
  const auto* c = reinterpret_cast<Cell*>(self);
  return PyBool_FromLong(c->slot >= 0 || c->bits);
}
static PyObject* Cell_recipe(PyObject* self, void*) {
  auto* r = reinterpret_cast<PyObject*>(reinterpret_cast<Cell*>(self)->recipe);
  if (!r) Py_RETURN_NONE;
  Py_INCREF(r);
  return r;
}
static PyObject* Cell_fresh(PyObject* self, void*) {
  return PyBool_FromLong(versions_current(reinterpret_cast<Cell*>(self)));
}
static PyObject* Cell_use_count(PyObject* self, void*) {
  auto* c = reinterpret_cast<Cell*>(self);
  return PyLong_FromUnsignedLong(c->strong ? c->strong.use_count() : c->weak.use_count());
}
static PyObject* Cell_ours_alone(PyObject* self, void*) {
  std::lock_guard<std::mutex> lock(g.mu);
  return PyBool_FromLong(ours_alone_locked(reinterpret_cast<Cell*>(self)));
}
static PyObject* Cell_held(PyObject* self, void*) {
  return PyBool_FromLong(bool(reinterpret_cast<Cell*>(self)->strong));
}
static PyObject* Cell_checksum(PyObject* self, void*) {
  auto* c = reinterpret_cast<Cell*>(self);
  if (!c->has_checksum) Py_RETURN_NONE;
  return PyLong_FromUnsignedLongLong(c->checksum);
}

#define BOOL_FIELD(name)                                                \
  static PyObject* Cell_get_##name(PyObject* self, void*) {             \
    return PyBool_FromLong(reinterpret_cast<Cell*>(self)->name);        \
  }                                                                     \
  static int Cell_set_##name(PyObject* self, PyObject* v, void*) {      \
    reinterpret_cast<Cell*>(self)->name = v && PyObject_IsTrue(v) == 1; \
    return 0;                                                           \
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
    case 0:
      return PyLong_FromLongLong(c->nbytes);
    case 1:
      return PyLong_FromLongLong(c->seq);
    case 2:
      return PyLong_FromLongLong(c->slot);
    case 3:
      return PyFloat_FromDouble(c->cost);
    case 4:
      return PyFloat_FromDouble(c->last_access);
    case 5:
      return PyLong_FromLong(c->handles);
    case 6:
      return PyLong_FromLong(c->names);
    case 7:
      return PyLong_FromLong(c->gone);
    case 9:
      return PyLong_FromLongLong(c->saved_in == g.pass ? static_cast<long long>(c->save_index) : -1);
    default:
      return PyBool_FromLong(c->incoming.get() != nullptr);
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
    {"stored", Cell_stored, nullptr, "bring_back() has them without an op: in the tier, or as bits", nullptr},
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
    {"save_index", Cell_num, nullptr, "among the cells that this pass saved, by their first save; -1: none of them",
     (void*)9},
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
    case 0:
      return obj_or_none(r->func);
    case 1:
      return obj_or_none(r->args);
    case 2:
      return obj_or_none(r->kwargs);
    case 3:
      return obj_or_none(r->rng);
    case 4:
      return obj_or_none(r->special);
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
    case 7:
      return PyLong_FromLong(r->env);
    case 8:
      return PyFloat_FromDouble(seconds_of(r));
    case 9:
      return PyBool_FromLong(r->ok);
    case 11:
      return PyLong_FromUnsignedLongLong(r->kind ? r->kind->hash : 0);
    default:
      return PyLong_FromLong(r->kind ? r->kind->trust.load() : 0);
  }
}
static int Recipe_set_object(PyObject* self, PyObject* v, void* which) {
  auto* r = reinterpret_cast<Recipe*>(self);
  PyObject*& field = reinterpret_cast<intptr_t>(which) == 3 ? r->rng : r->special;
  if (&field == &r->rng) g.attached_bytes += 5056;  // what torch's CPU generator takes
  if (v == Py_None) v = nullptr;
  Py_XINCREF(v);
  Py_XSETREF(field, v);
  return 0;
}
static int Recipe_set_cost(PyObject* self, PyObject* v, void*) {
  const double seconds = v ? PyFloat_AsDouble(v) : 0;
  if (PyErr_Occurred()) return -1;
  note_seconds(reinterpret_cast<Recipe*>(self), seconds);
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
    {"cost", Recipe_get, Recipe_set_cost, "seconds; setting it notes one more sample of its kind", (void*)8},
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
  r->leaf.~weak_intrusive_ptr();
  r->counter.~VariableVersion();
  r->sizes.~SmallVector();
  r->strides.~SmallVector();
  Py_TYPE(self)->tp_free(self);
}
static PyObject* Ref_cell(PyObject* self, void*) {
  return obj_or_none(reinterpret_cast<PyObject*>(reinterpret_cast<Ref*>(self)->cell));
}
static PyObject* Ref_mutated(PyObject* self, void*) { return PyBool_FromLong(reinterpret_cast<Ref*>(self)->mutated); }
static int Ref_set_mutated(PyObject* self, PyObject* v, void*) {
  reinterpret_cast<Ref*>(self)->mutated = PyObject_IsTrue(v) == 1;
  return 0;
}
static PyObject* Ref_leaf(PyObject* self, void*) {
  auto t = reinterpret_cast<Ref*>(self)->leaf.lock();
  if (!t) Py_RETURN_NONE;
  return wrap(std::move(t));
}
static PyGetSetDef Ref_getset[] = {
    {"cell", Ref_cell, nullptr, nullptr, nullptr},
    {"leaf", Ref_leaf, nullptr, "the saved tensor itself, if it is a leaf and lives", nullptr},
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
  new (&r->counter) c10::VariableVersion(handle && !t->is_inference() ? t->version_counter() : c10::VariableVersion());
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl>;
  const bool leaf = handle && at::impl::GetVariableHooks()->is_leaf(reinterpret_cast<const at::TensorBase&>(t));
  new (&r->leaf) Weak(leaf ? c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(t) : nullptr);
  Py_INCREF(c);
  r->cell = c;
  r->mutated = false;
  r->handle = handle;
  if (handle) {
    add_handle(c);
    if (!t->is_inference()) {
      const void* id = counter_identity(t->version_counter());
      for (Version& v : c->versions)
        if (counter_identity(v.counter) == id) v.saved = true;
    }
  }
  return r;
}

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
// A cell of its own with the bytes that the tensor's storage has now, or null when there is no room.
Cell* private_copy(c10::TensorImpl* t) {
  auto* from = t->unsafe_storage().unsafeGetStorageImpl();
  const uint64_t floor = g.floor_bytes.load();
  try {
    StorageRef to = storage_copy(from);
    if (!to) return nullptr;
    auto twin = byte_tensor(to);
    Cell* c = fresh_cell(twin.get());
    g.attached_bytes += from->nbytes();
    std::lock_guard<std::mutex> lock(g.mu);
    c->strong = std::move(to);  // the recipe that is being made will name it, and keeps it as a root
    return c;
  } catch (const c10::Error&) {
    g.floor_bytes = floor;  // the run does without it
    return nullptr;
  }
}
void discard_copy(Cell* c) { drop_slot(c); }
bool cell_present(Cell* c) { return is_present(c); }

}  // namespace memmgr
