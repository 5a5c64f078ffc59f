// The recorder's hot path: what runs for every op and every saved tensor. Anything unusual goes to Python.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "shim.h"
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace memmgr {

Ref* make_ref(c10::TensorImpl* t, Cell* c, bool handle);
Recipe* new_recipe(int nlinks);
void link_recipe_input(Recipe* r, int i, Cell* c);
Cell* fresh_cell(c10::TensorImpl* t);
Cell* private_copy(c10::TensorImpl* t);
void discard_copy(Cell* c);
bool cell_present(Cell* c);
bool ready_types(PyObject* module);
bool ready_sections(PyObject* module);
bool find_payload(PyObject* sample);

static PyObject* out_of_memory_type = nullptr;
static PyObject* on_unpack_other = nullptr;
static PyObject* on_pack_other = nullptr;

// ---- circumstances (rule 5) ----

static void circumstances(std::vector<int64_t>& v) {  // in the order of memmgr/_circumstances.py
  const at::Context& c = at::globalContext();
  v = {c.userEnabledCuDNN(),
       c.benchmarkCuDNN(),
       c.deterministicCuDNN(),
       c.userEnabledMkldnn(),
       c.deterministicMkldnn(),
       c.deterministicAlgorithms(),
       c.deterministicAlgorithmsWarnOnly(),
       c.deterministicFillUninitializedMemory(),
       c.userEnabledFlashSDP(),
       c.userEnabledMemEfficientSDP(),
       c.userEnabledMathSDP(),
       c.userEnabledCuDNNSDP(),
       c.allowFP16ReductionCPU(),
       at::get_num_threads(),
#if defined(__x86_64__)
       static_cast<int64_t>(_mm_getcsr() & 0x8040),  // flush to zero, denormals are zero
#else
       0,
#endif
       static_cast<int64_t>(c10::get_default_dtype().toScalarType())};
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 13)
  using B = at::Float32Backend;
  using O = at::Float32Op;
  for (B b : {B::CUDA, B::MKLDNN})
    for (O o : {O::CONV, O::RNN, O::MATMUL}) v.push_back(static_cast<int64_t>(c.float32Precision(b, o)));
#else
  v.push_back(static_cast<int64_t>(c.float32MatmulPrecision()));
  v.push_back(c.allowTF32CuDNN());
#endif
}

static int current_environment() {
  static thread_local std::vector<int64_t> now;
  static int last = -1;
  circumstances(now);
  if (last >= 0 && g.environments[static_cast<size_t>(last)] == now) return last;
  for (size_t i = 0; i < g.environments.size(); ++i)
    if (g.environments[i] == now) return last = static_cast<int>(i);
  g.environments.push_back(now);
  return last = static_cast<int>(g.environments.size()) - 1;
}

// ---- recipes ----

constexpr int64_t kSnapshotBytes = 256 * 1024;

struct Encoder {
  c10::SmallVector<Cell*, 8> cells;
  c10::SmallVector<Cell*, 2> copies;  // references that are ours
  uint64_t hash = 0;
  bool plain = true;  // every tensor could be described
  bool ok = true;     // every input can be had again

  void mix(uint64_t v) { hash = mixed(hash, v); }

  PyObject* value(PyObject* v) {
    if (v == Py_None) {
      mix(3);
      Py_INCREF(v);
      return v;
    }
    if (c10::TensorImpl* t = impl_of(v)) {
      if (!is_plain(t) || t->is_inference()) {
        plain = false;
        return nullptr;
      }
      Cell* c = lookup_cell(t);
      if (!c) {
        plain = false;
        return nullptr;
      }
      if (c->blank || c->lost || (c->recipe && !c->recipe->ok && !c->strong)) ok = false;
      if (c->exposed) {
        // Others can write there unseen: a small one is copied for the recipe, a large one has no recipe (rule 6).
        Cell* copy = c->nbytes <= kSnapshotBytes ? private_copy(t) : nullptr;
        if (copy) {
          cells.push_back(copy);
          copies.push_back(copy);
          c = copy;
        } else {
          ok = false;
          cells.push_back(c);
        }
      } else {
        cells.push_back(c);
      }
      c->last_access = g.clock;
      mix(static_cast<uint64_t>(t->dtype().toScalarType()) * 31 + static_cast<uint64_t>(t->device_type()));
      for (int64_t n : t->sizes()) mix(static_cast<uint64_t>(n));
      for (int64_t n : t->strides()) mix(static_cast<uint64_t>(n) + 7);
      return reinterpret_cast<PyObject*>(make_ref(t, c, false));
    }
    if (PyTuple_CheckExact(v) || PyList_CheckExact(v)) {
      mix(static_cast<uint64_t>(PySequence_Fast_GET_SIZE(v)) + 1000);
      return mapped(v, [this](PyObject* item) { return value(item); });
    }
    mix(reinterpret_cast<uintptr_t>(Py_TYPE(v)));
    int overflow = 1;
    const long long number = PyLong_CheckExact(v) ? PyLong_AsLongLongAndOverflow(v, &overflow) : 0;
    const Py_hash_t h = overflow ? PyObject_Hash(v) : number;  // Python gives -1 and -2 the same hash
    if (overflow && h == -1 && PyErr_Occurred())
      PyErr_Clear();
    else
      mix(static_cast<uint64_t>(h));
    Py_INCREF(v);
    return v;
  }
};

static Kind* kind_of(uint64_t hash, PyObject* func) {
  auto [it, fresh] = g.kinds.try_emplace(hash, nullptr);
  if (fresh) {
    it->second = new Kind;
    it->second->hash = hash;
    it->second->func = func;  // ops live as long as the process
    Py_INCREF(func);
  }
  return it->second;
}

// Null without an error when a tensor cannot be described.
static Recipe* encode(PyObject* func, PyObject* args, PyObject* kwargs) {
  note_place(func);
  Encoder e;
  e.mix(reinterpret_cast<uintptr_t>(func));
  PyObject* a = e.value(args);
  PyObject* k = nullptr;
  if (a && kwargs && kwargs != Py_None && PyDict_GET_SIZE(kwargs)) {
    k = PyDict_New();
    PyObject *key, *v;
    Py_ssize_t pos = 0;
    while (k && PyDict_Next(kwargs, &pos, &key, &v)) {
      e.mix(static_cast<uint64_t>(PyObject_Hash(key)));
      PyObject* item = e.value(v);
      if (!item) {
        Py_CLEAR(k);
        break;
      }
      PyDict_SetItem(k, key, item);
      Py_DECREF(item);
    }
    if (!k) Py_CLEAR(a);
  }
  if (!a) {
    for (Cell* copy : e.copies) {  // nobody is going to name them
      release_strong(copy);
      deferred_decref(reinterpret_cast<PyObject*>(copy));
    }
    return nullptr;
  }
  Recipe* r = new_recipe(static_cast<int>(e.cells.size()));
  if (!r) return nullptr;
  const uint32_t stamp = ++g.stamp;
  for (size_t i = 0; i < e.cells.size(); ++i) {
    Cell* c = e.cells[i];
    link_recipe_input(r, static_cast<int>(i), c);
    if (!c->recipe || c->stamp == stamp) continue;  // roots are there anyway, and each counts once
    c->stamp = stamp;
    r->reads_bytes += static_cast<uint64_t>(c->nbytes);
    if (c->handles == 0) {
      r->above_seconds += seconds_to_remake(c->recipe);
      r->above_drawn |= is_drawn(c->recipe);
    }
    r->room_bytes = std::max(r->room_bytes, c->recipe->room_bytes);
  }
  for (Cell* copy : e.copies) Py_DECREF(copy);
  Py_INCREF(func);
  r->func = func;
  r->args = a;
  r->kwargs = k;
  r->env = current_environment();
  r->module = tl_module;
  e.mix(static_cast<uint64_t>(r->env));
  r->kind = kind_of(e.hash, func);
  r->ok = e.ok;
  return r;
}

static void adopt_one(Recipe* r, PyObject* o) {
  c10::TensorImpl* t = impl_of(o);
  if (t) {
    Cell* made = nullptr;
    if (is_plain(t) && !t->is_inference()) {
      auto* s = t->unsafe_storage().unsafeGetStorageImpl();
      auto it = g.table.find(s);
      const bool alias = it != g.table.end() && (it->second->strong || !it->second->weak.expired());
      if (!alias && s->nbytes() > 0) {
        made = fresh_cell(t);
        if (made) {
          made->exposed = false;
          made->cost = r->cost;
          made->maker = r->kind;
          if (r->ok) {  // a recipe that cannot run would only keep the cell from being treated as the root that it is
            Py_INCREF(r);
            made->recipe = r;
          }
          Py_DECREF(made);  // the table has it
        }
      }
    }
    r->outputs.push_back(made && made->recipe ? made : nullptr);
    if (made) note_made(r, made->nbytes);
    return;
  }
  if (PyTuple_Check(o) || PyList_Check(o)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(o); ++i) adopt_one(r, PySequence_Fast_GET_ITEM(o, i));
    return;
  }
  r->outputs.push_back(nullptr);
}

// ---- pressure ----

// Policies rank ahead of need (design §4): when the room left is smaller than what a request may be and too little is
// armed.
static bool maybe_rank() {
  if (!g.on_rank || !g.arena) return true;
  if (g.always_rank) {
    PyObject* r = PyObject_CallFunction(g.on_rank, "K", 0ull);
    Py_XDECREF(r);
    return r != nullptr;
  }
  if (plan_leads()) {
    plan_settle();
    return true;
  }
  if (g.events_since_rank++ < g.rank_backoff) return true;
  const uint64_t budget = mm_arena_budget(g.arena);
  if (budget == MM_UNLIMITED) return true;
  const uint64_t resident = mm_arena_resident(g.arena);
  const uint64_t reserve = reserve_bytes();
  if (resident + reserve <= budget || g.armed_bytes >= reserve) return true;
  g.events_since_rank = 0;
  PyObject* r = PyObject_CallFunction(g.on_rank, "K", static_cast<unsigned long long>(reserve));
  if (!r) return false;
  // Ranking is not free: when it finds little, wait for a few more events before the next try.
  const long long armed = PyLong_Check(r) ? PyLong_AsLongLong(r) : 0;
  g.rank_backoff = static_cast<uint64_t>(armed) >= reserve ? 0 : std::min<uint64_t>(256, g.rank_backoff * 2 + 8);
  Py_DECREF(r);
  return true;
}

// Has the program let go of a large root, so that only recipes hold it?
static bool large_root_alone() {
  bool alone = false;
  for (size_t i = 0; i < g.kept_large.size();) {
    Cell* c = g.kept_large[i];
    const bool done = !c->strong || c->names == 0 || c->handles > 0;
    const bool ours = !done && c->strong.use_count() == 1;
    alone |= ours;
    if (done || ours) {
      g.kept_large[i] = g.kept_large.back();
      g.kept_large.pop_back();
      deferred_decref(reinterpret_cast<PyObject*>(c));
    } else {
      ++i;
    }
  }
  return alone;
}

static bool kept_check() {
  if (!g.on_kept || !g.arena) return true;
  if (!g.kept_large.empty() && large_root_alone()) g.kept_new_bytes = UINT64_MAX / 2;
  if (g.kept_new_bytes < (1u << 20) || g.kept_new_bytes < mm_arena_resident(g.arena) / 256) return true;
  g.kept_new_bytes = 0;
  PyObject* r = PyObject_CallNoArgs(g.on_kept);
  if (!r) return false;
  Py_DECREF(r);
  return true;
}

// ---- ops ----

// Coop's list: convolutions, products of matrices, and what consists of them.
static bool dear_to_recompute(PyObject* func) {
  PyObject* text = PyObject_GetAttrString(func, "__name__");
  const char* name = text && PyUnicode_Check(text) ? PyUnicode_AsUTF8(text) : "";
  bool dear = false;
  for (const char* part : {"convolution", "mm.", "bmm", "addmv", "linear.", "dot_product_attention", "lstm", "gru"})
    dear |= std::strstr(name, part) != nullptr;
  Py_XDECREF(text);
  PyErr_Clear();
  return dear;
}

// Where the op that runs allocates.
struct Side {
  const int before = tl_side;
  explicit Side(const OpInfo* info) { tl_side = info->dear ? MM_SIDE_HIGH : MM_SIDE_LOW; }
  ~Side() { tl_side = before; }
};

static OpInfo* info_of(PyObject* func) {
  auto it = g.ops.find(func);
  if (it != g.ops.end()) return it->second;
  PyObject* r = PyObject_CallOneArg(g.on_classify, func);
  if (!r) return nullptr;
  PyObject *call, *wargs, *wkwargs;
  int cls, mutates, seeded;
  if (!PyArg_ParseTuple(r, "OippO!O!", &call, &cls, &mutates, &seeded, &PyTuple_Type, &wargs, &PyTuple_Type,
                        &wkwargs)) {
    Py_DECREF(r);
    return nullptr;
  }
  auto* info = new OpInfo{};
  Py_INCREF(func);
  Py_INCREF(call);
  info->func = func;
  info->call = call;
  info->cls = static_cast<uint8_t>(cls);
  info->mutates = mutates;
  info->seeded = seeded;
  info->dear = dear_to_recompute(func);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(wargs); ++i)
    info->written_args.push_back(static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(wargs, i))));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(wkwargs); ++i) {
    PyObject* k = PyTuple_GET_ITEM(wkwargs, i);
    Py_INCREF(k);
    info->written_kwargs.push_back(k);
  }
  Py_DECREF(r);
  g.ops[func] = info;
  return info;
}

static bool known_storage(PyObject* o) {
  if (!o || o == Py_None) return false;
  if (c10::TensorImpl* t = impl_of(o)) {
    if (!is_plain(t)) return t->is_python_dispatch();
    return g.table.count(t->unsafe_storage().unsafeGetStorageImpl()) > 0;
  }
  if (PyTuple_Check(o) || PyList_Check(o))
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(o); ++i)
      if (known_storage(PySequence_Fast_GET_ITEM(o, i))) return true;
  return false;
}

// Does the op write to memory that somebody may still ask for? Most writes of an optimizer step do not.
static bool writes_known(const OpInfo* info, PyObject* args, PyObject* kwargs) {
  if (info->cls == OP_OPAQUE && info->written_args.empty() && info->written_kwargs.empty()) {
    if (known_storage(args)) return true;
    if (kwargs && kwargs != Py_None) {
      PyObject *k, *v;
      Py_ssize_t pos = 0;
      while (PyDict_Next(kwargs, &pos, &k, &v))
        if (known_storage(v)) return true;
    }
    return false;
  }
  for (int i : info->written_args)
    if (i < PyTuple_GET_SIZE(args) && known_storage(PyTuple_GET_ITEM(args, i))) return true;
  if (kwargs && kwargs != Py_None)
    for (PyObject* k : info->written_kwargs)
      if (known_storage(PyDict_GetItem(kwargs, k))) return true;
  return false;
}

static PyObject* translate_oom(PyObject* result) {
  if (result || !g.on_oom || !out_of_memory_type || !PyErr_ExceptionMatches(out_of_memory_type)) return result;
  PyObject *t, *v, *tb;
  PyErr_Fetch(&t, &v, &tb);
  PyErr_NormalizeException(&t, &v, &tb);
  if (tb) PyException_SetTraceback(v, tb);
  PyObject* r = PyObject_CallOneArg(g.on_oom, v);  // raises
  Py_XDECREF(r);
  if (!PyErr_Occurred())
    PyErr_Restore(t, v, tb);
  else {
    Py_XDECREF(t);
    Py_XDECREF(v);
    Py_XDECREF(tb);
  }
  return nullptr;
}

// Runs an op that writes nothing. Out of memory: garbage cycles may hold tensors, so Python collects them and the op
// runs once more, here between two ops, where no lock of torch's is held. `drawn` (_rng.Drawn, or null) is where it
// began to draw: what it drew before there was no room is put back, or the second run would go on with other numbers
// (rule 4).
static PyObject* call_again(PyObject* call, PyObject* args, PyObject* kw, PyObject* drawn = nullptr) {
  const uint64_t floor = g.floor_bytes.load(std::memory_order_relaxed);
  PyObject* out = PyObject_Call(call, args, kw);
  if (out || !g.on_retry || !out_of_memory_type || !PyErr_ExceptionMatches(out_of_memory_type)) return out;
  PyObject *t, *v, *tb;
  PyErr_Fetch(&t, &v, &tb);
  Py_CLEAR(tb);  // the frames hold tensors
  PyObject* r = PyObject_CallNoArgs(g.on_retry);
  const bool worth = r && PyObject_IsTrue(r) == 1;
  Py_XDECREF(r);
  if (!worth) {
    PyErr_Clear();
    PyErr_Restore(t, v, tb);
    return nullptr;
  }
  Py_XDECREF(t);
  Py_XDECREF(v);
  g.floor_bytes = floor;  // what was refused is had after all, or refused again
  if (drawn) {
    PyObject* done = PyObject_CallMethod(drawn, "put_back", nullptr);
    if (!done) return nullptr;
    Py_DECREF(done);
  }
  return PyObject_Call(call, args, kw);
}

// On a device the call only queues the op: how long that takes says nothing. What a kind takes is measured once, when
// it is proven (Recorder._trial); until then a kernel is taken to be limited by memory, at the bandwidth of a slow
// device.
static void guess_seconds(Recipe* r) {
  constexpr double kBytesPerSecond = 3e11, kLaunchSeconds = 5e-6;
  if (r->kind && r->kind->seconds >= 0) {
    r->cost = r->kind->seconds;
    return;
  }
  double bytes = 0;
  for (int i = 0; i < r->nlinks; ++i)
    if (r->links[i].cell) bytes += static_cast<double>(r->links[i].cell->nbytes);
  r->cost = kLaunchSeconds + bytes / kBytesPerSecond;
}

// Runs the op and notes how long it took without our own stalls.
static PyObject* timed_call(Recipe* r, PyObject* call, PyObject* args, PyObject* kwargs, bool again) {
  if (g.detail.load(std::memory_order_relaxed)) {
    tl_op = r->kind;
    tl_op_module = tl_module;
  }
  const uint64_t stall0 = tl_stall_ns;
  const uint64_t t0 = now_ns();
  kwargs = kwargs == Py_None ? nullptr : kwargs;
  PyObject* out = again ? call_again(call, args, kwargs, r->rng) : PyObject_Call(call, args, kwargs);
  const uint64_t dt = now_ns() - t0, stalled = tl_stall_ns - stall0;
  if (g.device)
    guess_seconds(r);
  else
    note_seconds(r, static_cast<double>(dt > stalled ? dt - stalled : 0) * 1e-9);
  if (C10_UNLIKELY(g.tracing)) trace_took(dt > stalled ? dt - stalled : 0);
  g.clock += r->cost;
  return out;
}

static PyObject* slow(PyObject* func, PyObject* types, PyObject* args, PyObject* kwargs, int cls) {
  return translate_oom(PyObject_CallFunction(g.on_slow, "OOOOi", func, types, args, kwargs, cls));
}

// Has the type a __torch_dispatch__ of its own? torch.Tensor, parameters and plain subclasses have not.
enum Subclass : uint8_t { ORDINARY = 0, STEP_ASIDE = 1, LET_RUN = 2 };

static Subclass dispatches(PyObject* type) {
  if (type == THPVariableClass) return ORDINARY;
  static std::unordered_map<PyObject*, Subclass> known;
  auto it = known.find(type);
  if (it != known.end()) return it->second;
  PyObject* own = PyObject_GetAttrString(type, "__torch_dispatch__");
  PyObject* base = PyObject_GetAttrString(THPVariableClass, "__torch_dispatch__");
  PyErr_Clear();
  Subclass kind = own != base ? STEP_ASIDE : ORDINARY;
  // What traces shapes is none of our business: it has no local ops, and it runs as if we were not there.
  const char* name = reinterpret_cast<PyTypeObject*>(type)->tp_name;
  if (kind == STEP_ASIDE && (std::strstr(name, "FakeTensor") || std::strstr(name, "FunctionalTensor"))) kind = LET_RUN;
  Py_XDECREF(own);
  Py_XDECREF(base);
  Py_INCREF(type);  // so that its address is not another type's one day
  return known[type] = kind;
}

// On the way to a mode torch switches off every dispatch key above Python's, the fallbacks for conjugated and negated
// views among them. A kernel that makes such views and computes with them (linalg_pinv) is then wrong, not merely
// different: so they are on again while the op runs, as they are without a mode.
struct LazyViews {
  c10::impl::ForceDispatchKeyGuard guard;  // puts everything back at its end
  LazyViews() {
    using K = c10::DispatchKey;
    auto tls = c10::impl::tls_local_dispatch_key_set();
    tls.excluded_ = tls.excluded_ - c10::DispatchKeySet({K::Conjugate, K::Negative, K::ZeroTensor});
    c10::impl::_force_tls_local_dispatch_key_set(tls);
  }
};

// The op, recorded if it is one that is; modes are off here.
static PyObject* run_op(PyObject* func, PyObject* types, PyObject* args, PyObject* kwargs) {
  if (!g.kept_large.empty() && !kept_check()) return nullptr;
  OpInfo* info = info_of(func);
  if (!info) return nullptr;
  if (g.device) note_streams(args, kwargs);
  const Side side(info);
  PyObject* kw = kwargs == Py_None ? nullptr : kwargs;
  if (!c10::GradMode::is_enabled()) {
    if ((info->mutates || info->cls == OP_OPAQUE) && writes_known(info, args, kw))
      return slow(func, types, args, kwargs, info->cls | 16);
    const uint64_t stall0 = tl_stall_ns, t0 = C10_UNLIKELY(g.tracing) ? now_ns() : 0;
    PyObject* out = info->mutates  ? PyObject_Call(info->call, args, kw)
                    : info->seeded ? slow(func, types, args, kwargs, info->cls | 16)
                                   : call_again(info->call, args, kw);
    if (t0) trace_took(now_ns() - t0 - (tl_stall_ns - stall0));
    return translate_oom(out);
  }
  if (info->cls == OP_VIEW) return PyObject_Call(info->call, args, kw);
  if (info->cls != OP_PURE) return slow(func, types, args, kwargs, info->cls);
  g.n.recorded_ops++;
  scan_floor(true);
  if (!maybe_rank()) return nullptr;
  Recipe* r = encode(func, args, kw);
  if (!r) {
    if (PyErr_Occurred()) return nullptr;
    return translate_oom(PyObject_Call(info->call, args, kw));
  }
  // First use of a kind: Python runs it, runs it again and compares (rule 7). It returns the first run's outputs.
  const bool first = g.on_new_kind && r->kind->trust.load(std::memory_order_relaxed) == TRUST_NEW;
  PyObject* out = translate_oom(
      first ? PyObject_CallFunction(g.on_new_kind, "OOOO", reinterpret_cast<PyObject*>(r), info->call, args, kwargs)
            : timed_call(r, info->call, args, kw, true));
  // What is not known to reproduce is not run again for what was made of it either: its outputs are roots (rule 7).
  if (g.on_new_kind && r->kind->trust.load(std::memory_order_relaxed) != TRUST_YES) r->ok = false;
  if (out) adopt_one(r, out);
  Py_DECREF(r);
  if (out && !kept_check()) {
    Py_DECREF(out);
    return nullptr;
  }
  return out;
}

// For the time of an op that a mode of ours sees. A mode below it that is not of the open budget is one that another
// budget left there, which another thread closed: what the upper one has in hand it lets pass.
class InOp {
 public:
  explicit InOp(PyObject* mode)
      : outer_(inside), ours_(!inside || reinterpret_cast<PyObject*>(Py_TYPE(mode)) == g.mode_class) {
    inside = true;
  }
  ~InOp() { inside = outer_; }
  InOp(const InOp&) = delete;
  InOp& operator=(const InOp&) = delete;
  bool ours() const { return ours_; }

 private:
  static thread_local bool inside;
  const bool outer_;
  const bool ours_;
};

thread_local bool InOp::inside = false;

// __torch_dispatch__(self, func, types, args, kwargs) of the recording mode.
static PyObject* dispatch(PyObject*, PyObject* const* a, Py_ssize_t n) {
  if (n < 4) return PyErr_Format(PyExc_TypeError, "dispatch(mode, func, types, args, kwargs)");
  PyObject *func = a[1], *types = a[2], *args = a[3], *kwargs = n > 4 ? a[4] : Py_None;
  const LazyViews lazy_views;
  // A thread that outlives the context still has the mode on its stack (rule 10).
  if (!g.active) return PyObject_Call(func, args, kwargs == Py_None ? nullptr : kwargs);
  settle();
  // A tensor subclass first says what it stands for; its local ops are what is recorded (rule 6).
  if (PyTuple_Check(types))
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types); ++i) {
      const Subclass kind = dispatches(PyTuple_GET_ITEM(types, i));
      if (kind == LET_RUN) return PyObject_Call(func, args, kwargs == Py_None ? nullptr : kwargs);
      if (kind == STEP_ASIDE) {
        Py_INCREF(Py_NotImplemented);
        return Py_NotImplemented;
      }
    }
  const InOp in_op(a[0]);
  if (!in_op.ours()) return PyObject_Call(func, args, kwargs == Py_None ? nullptr : kwargs);
  if (C10_UNLIKELY(g.tracing) && traced_here()) return traced_op(func, types, args, kwargs);
  return run_op(func, types, args, kwargs);
}

// record(func, args, kwargs) -> Recipe or None
static PyObject* py_record(PyObject*, PyObject* args) {
  PyObject *func, *a, *k;
  if (!PyArg_ParseTuple(args, "OO!O", &func, &PyTuple_Type, &a, &k)) return nullptr;
  settle();
  Recipe* r = encode(func, a, k == Py_None ? nullptr : k);
  if (!r) {
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
  }
  return reinterpret_cast<PyObject*>(r);
}

static PyObject* py_call(PyObject*, PyObject* args) {
  PyObject *r, *call, *a, *k;
  int retry = 0;
  if (!PyArg_ParseTuple(args, "O!OOO|p", &RecipeType, &r, &call, &a, &k, &retry)) return nullptr;
  return timed_call(reinterpret_cast<Recipe*>(r), call, a, k, retry != 0);
}

// call_drawn(drawn, call, args, kwargs): an op that draws, not recorded.
static PyObject* py_call_drawn(PyObject*, PyObject* args) {
  PyObject *drawn, *call, *a, *k;
  if (!PyArg_ParseTuple(args, "OOO!O!", &drawn, &call, &PyTuple_Type, &a, &PyDict_Type, &k)) return nullptr;
  return call_again(call, a, k, drawn);
}

static PyObject* py_adopt(PyObject*, PyObject* args) {
  PyObject *r, *out;
  if (!PyArg_ParseTuple(args, "O!O", &RecipeType, &r, &out)) return nullptr;
  adopt_one(reinterpret_cast<Recipe*>(r), out);
  Py_RETURN_NONE;
}

static PyObject* py_after_op(PyObject*, PyObject*) {
  if (!maybe_rank() || !kept_check()) return nullptr;
  Py_RETURN_NONE;
}

}  // namespace memmgr
