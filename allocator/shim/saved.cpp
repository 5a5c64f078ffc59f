// What happens to a tensor that autograd saves.
#include "shim.h"

namespace memmgr {

// ---- saved tensors ----

static PyObject* pack(PyObject*, PyObject* o) {
  settle();
  g.n.packs++;
  c10::TensorImpl* t = impl_of(o);
  if (!g.active || !t || !is_plain(t) || t->is_inference() || !managed_here(t->unsafe_storage().unsafeGetStorageImpl()))
    return PyObject_CallOneArg(on_pack_other, o);
  Cell* c = lookup_cell(t);
  if (!c) return nullptr;
  auto* h = reinterpret_cast<PyObject*>(make_ref(t, c, true));
  if (!h) return nullptr;
  if (c->saved_in != g.pass) {
    c->saved_in = g.pass;
    c->save_index = g.saved_in_pass++;
    plan_saved(c);
  }
  if (C10_UNLIKELY(g.tracing)) trace_saved(t, c);
  if (!maybe_rank()) {
    Py_DECREF(h);
    return nullptr;
  }
  return h;
}

static PyObject* modified_error(const Ref* h) {
  // Autograd's own words, so that what matches on them goes on matching (rule 8).
  const Cell* c = h->cell;
  unsigned at = 0, now = 1;
  for (const Version& v : c->versions)
    if (v.saved && v.counter.current_version() != v.at) {
      at = v.at;
      now = v.counter.current_version();
    }
  std::string shape;
  for (int64_t s : h->sizes) shape += (shape.empty() ? "" : ", ") + std::to_string(s);
  return PyErr_Format(
      PyExc_RuntimeError,
      "one of the variables needed for gradient computation has been modified by an inplace operation: "
      "[torch.%s [%s]] is at version %u; expected version %u instead. Hint: enable anomaly detection to "
      "find the operation that failed to compute its gradient, with torch.autograd.set_detect_anomaly(True).",
      std::string(h->dtype.name()).c_str(), shape.c_str(), now, at);
}

// The bytes that the view reaches, from the start of its storage.
static size_t extent_bytes(const Ref* r) {
  int64_t last = r->offset;
  for (size_t i = 0; i < r->sizes.size(); ++i) {
    if (r->sizes[i] == 0) return 0;
    last += (r->sizes[i] - 1) * r->strides[i];
  }
  return static_cast<size_t>(last + 1) * r->dtype.itemsize();
}

// A write to what was unpacked moves the counter that was saved, so the next unpack is autograd's error (rule 8).
static c10::intrusive_ptr<c10::TensorImpl> unpacked(const Ref* h, StorageRef s) {
  auto t = tensor_of(h, std::move(s));
  if (!h->counter.enabled()) return t;
  t->set_version_counter(h->counter);
  const void* id = counter_identity(h->counter);
  std::lock_guard<std::mutex> lock(g.mu);
  for (const Version& v : h->cell->versions)
    if (counter_identity(v.counter) == id) return t;
  h->cell->versions.push_back({h->counter, h->counter.current_version(), true});  // the bytes were made anew
  return t;
}

static PyObject* unpack(PyObject*, PyObject* o) {
  if (Py_TYPE(o) != &RefType) return PyObject_CallOneArg(on_unpack_other, o);
  settle();
  sweep_a_little();
  g.n.unpacks++;
  auto* h = reinterpret_cast<Ref*>(o);
  Cell* c = h->cell;
  g.last_unpacked = c->seq;
  if (C10_UNLIKELY(g.tracing)) trace_used(c);
  if (g.detail.load(std::memory_order_relaxed)) {  // what backward waits for from here on is waited for by this op
    tl_op = c->maker;
    tl_op_module = c->module;
  }
  plan_unpacked(c);
  // Who reads ahead leaves the reserve free. A thread woken for nothing takes the GIL from the one that works.
  if (g.offloaded_cells > 0 && g.on_progress && !plan_brings_back() &&
      mm_arena_resident(g.arena) + reserve_bytes() < mm_arena_budget(g.arena)) {
    PyObject* r = PyObject_CallFunction(g.on_progress, "L", static_cast<long long>(c->seq));
    if (!r) return nullptr;
    Py_DECREF(r);
  }
  for (int tries = 0; tries < 64; ++tries) {
    if (c->stale || (c->gone == PRESENT && !saved_current(c))) return modified_error(h);
    StorageRef s;
    mm_stream filled_on = kNotFilled;
    {
      std::lock_guard<std::mutex> lock(g.mu);
      if (c->gone == PRESENT && c->strong && data_present(c->strong.get())) {
        s = c->strong;
        filled_on = c->filled_on;
        disarm_locked(c);
      }
    }
    if (s) {
      if (!wait_for_filling(s.get(), filled_on, RULE_FILLED)) return nullptr;
      if (c->slot >= 0) discard_copy(c);  // from here on somebody could write
      c->last_access = g.clock;
      note_stream(s.get(), RULE_UNPACKED);
      if (s->nbytes() < extent_bytes(h))
        return PyErr_Format(PyExc_RuntimeError,
                            "memmgr: the storage of a saved tensor was resized and is too short for it");
      PyObject* out = wrap(unpacked(h, std::move(s)));
      if (out && !maybe_rank()) Py_CLEAR(out);
      return out;
    }
    bool recompute;
    if (!bring_back(c, &recompute)) return translate_oom(nullptr);
    if (recompute) {
      PyObject* r = translate_oom(PyObject_CallOneArg(g.on_missing, reinterpret_cast<PyObject*>(c)));
      if (!r) return nullptr;
      Py_DECREF(r);
    }
  }
  return PyErr_Format(PyExc_RuntimeError,
                      "memmgr: a saved tensor leaves as fast as it is brought back; the budget is too small");
}

}  // namespace memmgr
