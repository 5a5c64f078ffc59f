// The life of cells, and the table that finds the cell of a storage.
#include <time.h>

#include "shim.h"

namespace at {
class TensorBase;
}
// libtorch_python exports these; its own header costs seven seconds of compile time.
extern PyObject* THPVariable_Wrap(const at::TensorBase& var);
extern PyObject* THPVariableClass;

namespace memmgr {

static int payload_offset = 0;  // of the TensorImpl pointer inside a Python tensor; found at start-up

// ---- tensors ----

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
  if (!k.has_any(c10::DispatchKeySet(c10::BackendComponent::CPUBit) |
                 c10::DispatchKeySet(c10::BackendComponent::CUDABit) |
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

c10::intrusive_ptr<c10::TensorImpl> byte_tensor(StorageRef storage) {
  const auto n = static_cast<int64_t>(storage->nbytes());
  const auto keys = keys_of(storage->device_type());
  auto t =
      c10::make_intrusive<c10::TensorImpl>(c10::Storage(std::move(storage)), keys, caffe2::TypeMeta::Make<uint8_t>());
  t->set_sizes_contiguous({n});
  return t;
}

// What C++ said when there was no room, as Python's error, without C++'s backtrace.
PyObject* raise_oom(const std::string& text) {
  PyObject* torch = PyImport_ImportModule("torch");
  PyObject* type = torch ? PyObject_GetAttrString(torch, "OutOfMemoryError") : nullptr;
  PyErr_SetString(type ? type : PyExc_MemoryError, text.substr(0, text.find('\n')).c_str());
  Py_XDECREF(type);
  Py_XDECREF(torch);
  return nullptr;
}

static const void* counter_identity(const c10::VariableVersion& v) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
  const void* p;
  std::memcpy(&p, &v, sizeof p);
  return p;
}

// ---- the life of a cell ----

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
  c->price = -1;
  c->filled_on = kNotFilled;
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
  if (c->bits && c->busy) wait_not_busy(c);  // they are being counted, or unpacked
  mm_slot slot;
  at::DataPtr incoming;
  Bits* bits;
  {
    std::lock_guard<std::mutex> lock(g.mu);
    slot = c->slot;
    c->slot = -1;
    c->slot_state = NO_SLOT;
    incoming = take_incoming_locked(c);
    bits = c->bits;
    c->bits = nullptr;
  }
  end_bits(bits, true);
  // Waits for what is under way, or memory is reused in stream order: either way `incoming` may go after it.
  if (slot >= 0 && g.tier) mm_tier_free(g.tier, slot);
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
  if (c->gone == OFFLOADED) {
    g.offloaded_cells--;
    g.offloaded_bytes -= std::min<uint64_t>(g.offloaded_bytes, c->nbytes);
  }
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
  if (c->gone == PRESENT)
    g.handled_bytes += static_cast<uint64_t>(c->nbytes);
  else {
    g.gone_bytes += static_cast<uint64_t>(c->nbytes);
  }
  price_locked(c);
}

// Would autograd miss anything that is made from `c`? What the program itself holds is there anyway, and saved again it
// is a root like any other. Looks at a bounded number of descendants; there being more counts as yes.
static bool wanted_through(Cell* c) {
  static std::vector<Cell*> work;
  work.assign(1, c);
  const uint32_t stamp = ++g.stamp;
  int looks = 0;
  while (!work.empty()) {
    const Cell* x = work.back();
    work.pop_back();
    for (const Link* l = x->named_by; l; l = l->next) {
      if (!l->recipe->ok) continue;
      for (Cell* out : l->recipe->outputs) {
        if (!out || out->stamp == stamp) continue;
        if (out->handles > 0 || ++looks > 128) return true;
        out->stamp = stamp;
        if (out->names > 0) work.push_back(out);
      }
    }
  }
  return false;
}

static void cut(Cell* first, bool itself, bool dry_run, std::vector<Cell*>* stranded);

static void remove_handle(Cell* c) {
  if (--c->handles > 0) return;
  plan_let_go(c);
  if (c->busy) wait_not_busy(c);
  {
    std::lock_guard<std::mutex> lock(g.mu);
    unprice_locked(c);
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
    if (root_in_use && (c->slot >= 0 || c->bits)) return;
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
  if (root_in_use && c->strong && c->strong.use_count() == 1 && !wanted_through(c)) {
    // An LSTM's gates stay with the recipe of a hidden state that the program keeps, four times its size.
    Py_INCREF(c);
    c->lost = true;
    cut(c, true, false, nullptr);
    release_strong(c);
    deferred_decref(reinterpret_cast<PyObject*>(c));
    return;
  }
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
    if (g.tier_doomed) close_doomed_tier();
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
    if (c->nbytes > (1 << 20)) {
      Py_INCREF(c);
      g.kept_large.push_back(c);
    }
  }
}

static void drop_recipe(Cell* c) {
  Recipe* r = c->recipe;
  if (!r) return;
  c->recipe = nullptr;
  for (Cell*& out : r->outputs)
    if (out == c) out = nullptr;
  if (c->names > 0) hold(c);  // a root now: who can still be made from it needs its bytes
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
      const bool has_bytes = c != first && (is_present(c) || c->slot >= 0 || c->bits);
      if (has_bytes) {
        if (!dry_run && c->names > 0) {
          hold(c);
          g.kept_new_bytes += static_cast<uint64_t>(c->nbytes);
        }
        if (!dry_run) deferred_decref(reinterpret_cast<PyObject*>(c));
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

// ---- the table ----

static void table_erase(std::unordered_map<c10::StorageImpl*, Cell*>::iterator it) {
  Cell* c = it->second;
  g.table.erase(it);
  deferred_decref(reinterpret_cast<PyObject*>(c));
}

// `c` is watched in `s` from now on (null: nowhere). Its entry goes with its old storage: only the weak pointer keeps
// that storage's address from being another's, which would then be taken for `c`.
static void watch_in(Cell* c, const StorageRef& s) {
  c10::StorageImpl* before = c->weak._unsafe_get_target();
  auto it = before == s.get() ? g.table.end() : g.table.find(before);
  const bool entered = it != g.table.end() && it->second == c;
  if (entered) g.table.erase(it);
  {
    std::lock_guard<std::mutex> lock(g.mu);
    c->weak = WeakStorage(s);
  }
  if (entered) deferred_decref(reinterpret_cast<PyObject*>(c));
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
  // What a large pass left empty would keep the small sweeps from coming round.
  if (g.table.bucket_count() > 8 * (g.table.size() + 512)) g.table.rehash(0);
  g.attached_bytes = 0;
}

// A few entries at every op, so that those of dead storages are found within a fraction of the table's size: their
// recipes keep roots and generator states.
void sweep_a_little() {
  constexpr size_t kBuckets = 8;
  const size_t n = g.table.bucket_count();
  c10::StorageImpl* dead[2 * kBuckets];
  size_t found = 0;
  for (size_t k = 0; k < std::min(kBuckets, n); ++k) {
    const size_t bucket = g.sweep_cursor++ % n;
    for (auto it = g.table.begin(bucket); it != g.table.end(bucket); ++it)
      if (found < 2 * kBuckets && !it->second->strong && it->second->weak.expired()) dead[found++] = it->first;
  }
  for (size_t i = 0; i < found; ++i) {
    auto it = g.table.find(dead[i]);
    if (it != g.table.end()) table_erase(it);
  }
}

static void enter(c10::StorageImpl* s, Cell* c) {
  sweep_a_little();
  auto [it, fresh] = g.table.try_emplace(s, c);
  Py_INCREF(c);
  if (!fresh) {
    Cell* old = it->second;
    it->second = c;
    deferred_decref(reinterpret_cast<PyObject*>(old));
  }
  // The entry of a storage that died keeps its recipe, and what hangs on that counts against the budget. A sweep looks
  // at every entry, so a large table waits for more.
  const bool heavy = g.attached_bytes > std::max<size_t>(64 << 10, 64 * g.table.size());
  if (g.table.size() > g.sweep_at || heavy) sweep();
}

static void see_version(Cell* c, c10::TensorImpl* t) {
  if (t->is_inference()) return;
  c->versions.push_back({t->version_counter(), t->version_counter().current_version(), false});
}

static void settle_doubtful();

// Takes out of the list what this thread wrote, and what another thread wrote so long ago that its op has returned (or
// the thread has ended).
static std::vector<Cell*> take_settled(std::vector<Written>& list) {
  constexpr uint64_t kReturnedNs = 100'000'000;
  std::vector<Cell*> taken;
  const pthread_t me = pthread_self();
  const uint64_t now = list.empty() ? 0 : now_ns();
  size_t kept = 0;
  for (const Written& w : list) {
    if (pthread_equal(w.by, me) || now - w.at_ns > kReturnedNs)
      taken.push_back(w.cell);
    else
      list[kept++] = w;
  }
  list.resize(kept);
  return taken;
}

void settle() {
  // What the last in-place op wrote has its new version by now (ADInplaceOrView counts after the kernel, and the kernel
  // is what the mode sees).
  if (!g.doubtful.empty()) settle_doubtful();
  if (g.unsettled.empty()) return;
  for (Cell* c : take_settled(g.unsettled)) {
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

static bool saved_under(const Cell* c, c10::TensorImpl* t) {
  if (t->is_inference()) return true;
  const void* id = counter_identity(t->version_counter());
  for (const Version& v : c->versions)
    if (v.saved && counter_identity(v.counter) == id) return true;
  return false;
}

// Written through an alias with a counter of its own (`.data`): autograd's saved tensor would not notice and would read
// the new bytes. So the cell stays and its bytes change: what was made from the old ones is cut off, and so is its
// recipe.
static void changed_in_place(Cell* c) {
  cut(c, false, false, nullptr);
  drop_recipe(c);
  if (!c->unsettled) {
    c->unsettled = true;
    Py_INCREF(c);
    g.unsettled.push_back({c, pthread_self(), now_ns()});
  }
}

// Off the list of cells that could leave, and without bytes: an unpack is autograd's error from now on (rule 8).
static void make_stale(Cell* c) {
  c->stale = true;
  if (c->busy) wait_not_busy(c);
  {
    std::lock_guard<std::mutex> lock(g.mu);
    unprice_locked(c);
    if (c->listed && c->gone == PRESENT) {
      g.handled_bytes -= std::min<uint64_t>(g.handled_bytes, c->nbytes);
      (c->prev ? c->prev->next : g.oldest) = c->next;
      (c->next ? c->next->prev : g.newest) = c->prev;
      c->prev = c->next = nullptr;
      c->listed = false;
    }
    disarm_locked(c);
  }
  drop_slot(c);
  release_strong(c);
  watch_in(c, StorageRef());
}

// An op wrote to what had been saved. If the counter moved, that is autograd's error; if it did not (the op hides its
// write, or preserved the counter), autograd would read the new bytes, and so do we.
static void settle_doubtful() {
  for (Cell* c : take_settled(g.doubtful)) {
    if (c->handles > 0) {
      if (!saved_current(c)) {
        make_stale(c);
      } else {
        cut(c, false, false, nullptr);
        drop_recipe(c);
      }
    }
    deferred_decref(reinterpret_cast<PyObject*>(c));
  }
}

// Bytes of another library or process: they may change as long as that pleases, so no copy of them is any good, and
// letting go of them frees nothing of the arena.
static bool memory_elsewhere(const c10::StorageImpl* s) {
  const void* p = const_cast<c10::StorageImpl*>(s)->_mutable_data_ptr_no_checks().get();
  return foreign_memory(s) && !(g.arena && p && mm_arena_owns(g.arena, p));
}

// A pointer to the cell's memory is in other hands: from now on its bytes may change unseen (rule 6).
void expose_cell(Cell* c) {
  if (c->exposed) {
    StorageRef live = c->strong ? c->strong : c->weak.lock();
    if (live && memory_elsewhere(live.get())) c->pinned = true;  // moved to shared memory since
    return;
  }
  Py_INCREF(c);
  if (c->handles == 0 && c->recipe) {
    // What was made from it can be made again from its recipe; the storage becomes a root of its own at its next use.
    {
      std::lock_guard<std::mutex> lock(g.mu);
      c->strong.reset();
    }
    StorageRef live = c->weak.lock();
    auto it = g.table.find(live.get());
    const bool entered = it != g.table.end() && it->second == c;
    watch_in(c, StorageRef());
    if (entered) {
      Cell* fresh = new_cell();
      fresh->weak = WeakStorage(live);
      fresh->nbytes = static_cast<int64_t>(live->nbytes());
      fresh->versions = c->versions;
      fresh->last_access = g.clock;
      fresh->exposed = true;
      enter(live.get(), fresh);
      Py_DECREF(fresh);
    }
  } else {
    cut(c, false, false, nullptr);
    drop_recipe(c);
    c->exposed = true;
  }
  deferred_decref(reinterpret_cast<PyObject*>(c));
}

// A write that nobody announced was noticed: the cell of this storage is no longer what it was.
static void written_unseen(c10::TensorImpl* t) {
  c10::StorageImpl* s = t->unsafe_storage().unsafeGetStorageImpl();
  auto it = g.table.find(s);
  if (it == g.table.end()) return;
  Cell* c = it->second;
  if (c->handles > 0 && saved_current(c)) {
    changed_in_place(c);
    settle();
    std::lock_guard<std::mutex> lock(g.mu);
    if (c->listed && c->gone == PRESENT)
      g.handled_bytes += s->nbytes() - std::min<uint64_t>(g.handled_bytes, c->nbytes);
    c->nbytes = static_cast<int64_t>(s->nbytes());  // resized, as FSDP does with its parameters
    return;
  }
  Py_INCREF(c);
  if (c->names > 0 && !c->recipe) {
    c->lost = true;
    cut(c, true, false, nullptr);
  }
  if (c->handles > 0) {
    c->stale = true;
  } else {
    std::lock_guard<std::mutex> lock(g.mu);
    c->strong.reset();
    disarm_locked(c);
  }
  watch_in(c, StorageRef());
  deferred_decref(reinterpret_cast<PyObject*>(c));
}

static Cell* make_cell(c10::TensorImpl* t) {
  Cell* c = new_cell();
  if (!c) return nullptr;
  StorageRef s = storage_of(t);
  c->weak = WeakStorage(s);
  c->nbytes = static_cast<int64_t>(s->nbytes());
  c->module = tl_module;
  c->last_access = g.clock;
  see_version(c, t);
  // Memory that another library owns may be written by it at any time.
  c->exposed = foreign_memory(s.get()) && !t->requires_grad();
  c->pinned = !managed_here(s.get()) || (c->exposed && memory_elsewhere(s.get()));
  const void* p = s->_mutable_data_ptr_no_checks().get();
  if (c->exposed && g.arena && p && mm_arena_owns(g.arena, p)) {
    // Somebody else's handle on memory that is ours (DLPack): whoever has it by its own storage is exposed as well.
    std::vector<Cell*> owners;
    for (auto& [other, cell] : g.table) {
      if (cell->weak.expired() && !cell->strong) continue;
      const auto* begin = static_cast<const char*>(other->_mutable_data_ptr_no_checks().get());
      if (begin && p >= begin && p < begin + other->nbytes()) owners.push_back(cell);
    }
    for (Cell* owner : owners) expose_cell(owner);
  }
  return c;
}

Cell* lookup_cell(c10::TensorImpl* t) {
  Cell* c = find_cell(t);
  if (c) return c;
  auto it = g.table.find(t->unsafe_storage().unsafeGetStorageImpl());
  // A pointer that was handed out outlives the version that was there then.
  const bool exposed = it != g.table.end() && it->second->exposed && !t->requires_grad();
  written_unseen(t);
  if ((c = find_cell(t))) return c;
  c = make_cell(t);
  if (!c) return nullptr;
  c->exposed |= exposed;
  enter(t->unsafe_storage().unsafeGetStorageImpl(), c);
  Py_DECREF(c);  // the table has it
  return c;
}

// ---- bytes come back ----

// A copy that was begun earlier, or one that begins now: its bytes, behind which the calling thread's stream waits.
static int read_back(mm_tier* tier, mm_slot slot, size_t n, at::DataPtr* bytes) {
  if (!bytes->get()) {
    *bytes = managed_block(n);
    return mm_tier_read_now(tier, slot, bytes->get());
  }
  return rule_holds(RULE_PREFETCHED) ? mm_tier_use(tier, slot, stream_now()) : 0;
}

static void arrived_locked(Cell* c, at::DataPtr bytes) {
  c->has_checksum = false;
  note_gone_over(c);
  c->gone = PRESENT;
  if (!c->strong)  // its shell went with the last handle, and a recipe still names it: a new one
    c->strong = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), c->nbytes,
                                                      at::DataPtr(nullptr, bytes.device()),
                                                      c10::GetAllocator(g.place.type()), true);
  c->strong->set_data_ptr_noswap(std::move(bytes));
  c->filled_on = g.device ? stream_now() : kNotFilled;
  if (c->listed) g.handled_bytes += static_cast<uint64_t>(c->nbytes);
  price_locked(c);
}

// From its bits, if nobody is quicker; the GIL is held, and dropped meanwhile. False: a Python error.
static bool expand(Cell* c) {
  const uint64_t t0 = now_ns(), stalled = tl_stall_ns;
  Bits* bits;
  {
    std::lock_guard<std::mutex> lock(g.mu);
    if (c->busy || c->gone != EVICTED || !c->bits) return true;
    bits = c->bits;
    c->busy = true;
  }
  std::string oom;
  bool differs = false;
  Py_BEGIN_ALLOW_THREADS {
    at::DataPtr bytes;
    const auto n = static_cast<size_t>(c->nbytes);
    try {
      bytes = managed_block(n);
      mm_bits_unpack(&bits->packed, bytes.get(), n);
      differs = c->has_checksum && checksum_bytes(bytes.get(), n) != c->checksum;
    } catch (const std::exception& e) {
      oom = e.what();
    }
    const bool arrived = oom.empty() && !differs;
    {
      std::lock_guard<std::mutex> lock(g.mu);
      if (arrived) {
        arrived_locked(c, std::move(bytes));
        c->bits = nullptr;
      }
      c->busy = false;
    }
    if (arrived) end_bits(bits, true);
  }
  Py_END_ALLOW_THREADS if (!oom.empty()) {
    raise_oom(oom);
    return false;
  }
  if (differs) {
    PyErr_Format(PyExc_RuntimeError, "memmgr: %lld bytes that were kept as bits came back other than they went",
                 static_cast<long long>(c->nbytes));
    return false;
  }
  if (c->strong && c->weak.expired()) watch_in(c, c->strong);
  const uint64_t dt = now_ns() - t0 - (tl_stall_ns - stalled);
  g.n.expand_ns += dt;
  note_event(HAPPENED_RECOMPUTE, c, dt);
  return true;
}

// Reloads an offloaded cell, or says that it wants recomputation. The GIL is held; it is dropped while waiting, and
// nobody who waits for a busy cell with the GIL waits for us: the cell is busy only while we do without.
bool bring_back(Cell* c, bool* recompute) {
  *recompute = false;
  const uint64_t t0 = now_ns();
  const auto n = static_cast<size_t>(c->nbytes);
  mm_tier* tier;
  mm_slot slot;
  at::DataPtr bytes;
  for (;;) {
    if (c->busy) {
      Py_BEGIN_ALLOW_THREADS wait_not_busy(c);
      Py_END_ALLOW_THREADS
    }
    if (c->gone == PRESENT && is_present(c)) return true;
    if (c->gone == EVICTED && c->bits) {
      if (!expand(c)) return false;
      continue;
    }
    if (c->gone != OFFLOADED || c->slot < 0 || !g.tier) {
      *recompute = true;
      return true;
    }
    std::lock_guard<std::mutex> lock(g.mu);
    if (c->busy) continue;  // malloc was quicker
    c->busy = true;
    tier = g.tier;
    slot = c->slot;
    bytes = take_incoming_locked(c);
    break;
  }
  const bool prefetched = bytes.get() != nullptr;
  if (plan_brings_back() && (!prefetched || mm_tier_poll(tier, slot) == 0)) plan_late(c);
  int rc = 0;
  std::string oom;
  bool differs = false;
  Py_BEGIN_ALLOW_THREADS try {
    rc = read_back(tier, slot, n, &bytes);
    if (rc >= 0 && c->has_checksum && !c->exposed) {
      uint64_t got = 0;
      differs = !checksum_of(g.place, bytes.get(), n, &got) || got != c->checksum;
    }
  } catch (const std::exception& e) {
    oom = e.what();
  }
  {
    std::lock_guard<std::mutex> lock(g.mu);
    if (oom.empty() && rc >= 0 && !differs) {
      arrived_locked(c, std::move(bytes));
    }
    c->busy = false;
  }
  Py_END_ALLOW_THREADS if (!oom.empty()) {
    raise_oom(oom);
    return false;
  }
  if (rc < 0) {
    g.n.tier_errors++;
    if (c->recipe && c->recipe->ok) {
      // The copy cannot be read, but the bytes can be made again.
      {
        std::lock_guard<std::mutex> lock(g.mu);
        if (c->gone != OFFLOADED || c->slot != slot) return true;  // somebody else had better luck
        g.offloaded_cells--;
        g.offloaded_bytes -= std::min<uint64_t>(g.offloaded_bytes, c->nbytes);
        c->gone = EVICTED;
      }
      drop_slot(c);
      *recompute = true;
      return true;
    }
    PyErr_Format(PyExc_OSError, "memmgr: reading a saved tensor back from the %s tier failed: %s",
                 g.device ? "host" : "disk", std::strerror(-rc));
    return false;
  }
  if (differs) {
    PyErr_Format(PyExc_RuntimeError,
                 "memmgr: %zu bytes came back from the tier below other than they went (%s, slot %lld)", n,
                 prefetched ? "prefetched" : "read when needed", static_cast<long long>(slot));
    return false;
  }
  if (c->strong && c->weak.expired()) watch_in(c, c->strong);
  g.n.reloads++;
  g.n.reload_bytes += n;
  if (prefetched)
    g.n.prefetch_hits++;
  else
    g.n.prefetch_misses++;
  const uint64_t dt = now_ns() - t0;
  tl_stall_ns += dt;
  g.n.stall_ns += dt;
  note_event(HAPPENED_RELOAD, c, dt);
  return true;
}

}  // namespace memmgr
