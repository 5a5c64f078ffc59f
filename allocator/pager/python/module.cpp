// The Python module: opening, closing and the errors. No op calls these functions.
#include <ATen/record_function.h>
#include <Python.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>

#include "base/clock.h"
#include "base/deferred_drop.h"
#include "base/errors.h"
#include "base/events.h"
#include "base/forked_child.h"
#include "base/gil.h"
#include "base/kernel_slots.h"
#include "base/link.h"
#include "base/lock.h"
#include "base/no_destructor.h"
#include "base/seen_threads.h"
#include "base/tensors.h"
#include "cells/adoption.h"
#include "cells/cell.h"
#include "cells/file_range.h"
#include "cells/fixed_memory.h"
#include "cells/freeze.h"
#include "cells/lifetime.h"
#include "cells/types.h"
#include "concurrency/python_threads.h"
#include "dispatch/the_session.h"
#include "guards/address_exports.h"
#include "guards/argument_pins.h"
#include "guards/captures.h"
#include "guards/collective_pins.h"
#include "guards/cpp_tensor_hooks.h"
#include "guards/escape.h"
#include "guards/mapped_files.h"
#include "guards/stream_guard.h"
#include "guards/unseen_threads.h"
#include "pools/cpu_arena.h"
#include "pools/device_pool.h"
#include "pools/pool.h"
#include "pools/small_blocks.h"
#include "pools/stream_rules.h"
#include "python/around.h"
#include "python/bind.h"
#include "python/bind_births.h"
#include "python/bind_figures.h"
#include "python/bind_plans.h"
#include "python/bind_pool.h"
#include "python/bind_ranking.h"
#include "python/bind_readers.h"
#include "python/fork.h"
#include "python/gradients.h"
#include "python/introspection.h"
#include "recipes/op_signature.h"
#include "recipes/recipe.h"
#include "residency/checksums.h"
#include "residency/evict.h"
#include "residency/floor.h"
#include "residency/reclaim.h"
#include "residency/restore.h"
#include "residency/transfer.h"

namespace memmgr::pager {

namespace {

const char* text_or_null(const std::optional<std::string>& text) { return text ? text->c_str() : nullptr; }

// The tier below `pool`. Without a folder, a pool on the host gets a tier that only reads files that are mapped.
void open_tier(Pool* pool, const char* folder, uint64_t disk_bytes, uint64_t throttle, uint64_t host_bytes) {
  char why[200] = {};
  if (pool->on_host() && folder) {
    the_session.tier = mm_tier_open_cached(folder, disk_bytes, throttle, 2, host_bytes, why, sizeof why);
    if (!the_session.tier) raise_error(PyExc_OSError, "memmgr: cannot open a tier file in %s: %s", folder, why);
  } else if (pool->on_host()) {
    the_session.tier = mm_tier_open(nullptr, 0, throttle, 1, why, sizeof why);
    if (!the_session.tier) raise_error(PyExc_OSError, "memmgr: cannot read files that are mapped: %s", why);
  } else if (host_bytes) {
    the_session.tier = pool->open_host_tier(host_bytes, folder, disk_bytes, throttle, why, sizeof why);
    if (!the_session.tier) raise_error(PyExc_OSError, "memmgr: cannot open a tier in host memory: %s", why);
  }
  the_session.tier_writes = the_session.tier && !(pool->on_host() && !folder);
  the_session.tier_has_file = pool->on_host() || folder;
}

void py_open(uint64_t limit, const std::optional<std::string>& tier_folder, uint64_t disk_bytes, uint64_t throttle,
             uint64_t small_bytes, bool may_evict, bool may_offload, bool torture, bool verify, bool prefetch,
             Order order, bool window, const std::string& device, const std::optional<std::string>& driver,
             uint64_t host_bytes) {
  const char* folder = text_or_null(tier_folder);
  TORCH_CHECK(!forked_child,
              "memmgr: this process was forked from one that has had a budget, and its memory is that one's: it can "
              "have no budget of its own. Start it with multiprocessing's \"spawn\", or fork before a budget opens.");
  TORCH_CHECK(!the_session.open, "memmgr: a budget is open already");
  seconds_of_ticks(0);
  const c10::Device where{device};
  Pool* pool = where.is_cpu() ? cpu_pool(the_session) : device_pool(the_session, where, text_or_null(driver));
  open_tier(pool, may_offload ? folder : nullptr, disk_bytes, throttle, may_offload ? host_bytes : 0);
  learn_mapped();
  Options o;
  o.small_bytes = small_bytes;
  o.may_evict = may_evict;
  o.may_offload = may_offload;
  o.torture = torture;
  o.verify = verify;
  o.prefetch = prefetch;
  o.order = order;
  o.window = window;
  o.search = window && limit != MM_UNLIMITED && pool->has_addresses();
  the_session.options = o;
  least_born_bytes = small_bytes;
  {
    const Hold lock(the_session.error_lock);
    the_session.tier_error.clear();
  }
  the_session.pool = pool;
  the_session.arena = pool->arena;
  the_session.adopted_stay = false;
  mm_arena_set_layout(the_session.arena, window ? MM_REMAP_LAST : MM_REMAP_FIRST);
  pool->set_budget(limit);
  pool->install();
  forget_askers();
  prepare_for_waiting();
  watch_forks();  // after the core's: handlers run in reverse, and the pager's waits for the tier
  mm_arena_reset_peak(the_session.arena);
  mm_arena_reset_counts(the_session.arena);
  reset_floor();
  forget_untried();
  new (&the_session.counters) Counters;  // from zero
  the_session.counters.ops_before = ops_counted();
  forget_moved();
  listeners = at::hasCallbacks() ? uint32_t{kOthers} : 0;
  catch_unseen_threads(the_session, true);
  watch_exports(the_session, true);
  the_session.open.store(true, std::memory_order_release);
  let_callbacks_rest(true);
  see_this_thread(true);
  let_others_end_their_ops(pool);
  const WithoutGil released;
  pool->settle();  // work on any stream that was queued before: no op of it was seen
}

// Returns the cells with references that keep them alive while the GIL is free.
std::vector<std::pair<Cell*, StoragePtr>> all_cells() {
  std::vector<std::pair<Cell*, WeakStorage>> weak;
  {
    const Hold lock(graph_lock());
    for_each_cell_locked([&](Cell* c) REQUIRES(graph_lock()) {
      if (c->storage._unsafe_get_target()) weak.emplace_back(c, c->storage);
    });
  }
  std::vector<std::pair<Cell*, StoragePtr>> held;
  for (auto& [c, w] : weak)
    if (StoragePtr s = w.lock()) {
      if (cell_of(s.get()) == c) held.emplace_back(c, std::move(s));
    }
  return held;
}

// A storage that was a cell of an earlier budget. A search of Python's objects does not find a storage that only
// autograd's graph holds.
struct FormerCell {
  WeakStorage storage;
  Escape escape;
};

// The GIL is held.
NoDestructor<std::vector<FormerCell>> former_cells;

// Bytes that move back to a mapping are in memory twice until the pool's pages are given back.
constexpr uint64_t kTrimEach = uint64_t{32} << 20;

// close(): restores all cells, gives the storages their own pointers back, and closes the tier.
void py_close() {
  if (!the_session.open) return;
  the_session.pool->set_budget(MM_UNLIMITED);
  the_session.options.torture = false;
  struct Staying {  // a restored cell is not evicted again
    Staying() { freeze_evictions(true); }
    ~Staying() { freeze_evictions(false); }
  };
  end_watch();
  forget_captures();
  forget_others();
  std::optional<Staying> staying(std::in_place);
  std::exception_ptr wrong;
  forget_periods();
  Py_BEGIN_ALLOW_THREADS;
  try {
    finish_transfers(the_session);
  } catch (...) {
    wrong = std::current_exception();
  }
  drop_what_waits();
  Py_END_ALLOW_THREADS;
  auto cells = all_cells();
  Py_BEGIN_ALLOW_THREADS;
  uint64_t moved = 0;
  const auto trim = [&] {
    mm_arena_trim(the_session.arena, 0);
    moved = 0;
  };
  for (const bool resident : {true, false}) {  // the pool's memory is free when the absent cells are restored
    for (auto& [c, s] : cells) {
      // A cell that an earlier budget gave up raises at its next use; this budget has lost nothing.
      if (c->given_up || (resident && !c->resident())) continue;
      try {
        bool back = return_to_mapping(c);
        if (!back && !resident) {
          fetch(c);
          back = return_to_mapping(c);
        }
        if (back && (moved += c->nbytes) >= kTrimEach) trim();
      } catch (...) {
        wrong = std::current_exception();
      }
    }
    if (moved) trim();
  }
  forget_works();
  exhume();
  try {
    if (rule_holds(kRuleClosed)) the_session.pool->settle();
    end_comparisons(true);
  } catch (...) {
    wrong = std::current_exception();
  }
  forget_comparisons();
  Py_END_ALLOW_THREADS;
  the_session.open.store(false, std::memory_order_release);
  catch_unseen_threads(the_session, false);
  let_callbacks_rest(false);
  watch_exports(the_session, false);
  // Ops of other threads that began under the budget have pins on cells that end now, or are about to pin them.
  Py_BEGIN_ALLOW_THREADS;
  if (!wait_until_kernel_is_left(60))
    wrong = std::make_exception_ptr(std::runtime_error("memmgr: an op of another thread has not ended for a minute"));
  Py_END_ALLOW_THREADS;
  staying.reset();
  forget_fixed();
  cells = all_cells();  // with the cells that were made in between
  cut_recipes(the_session, true);
  for (auto& [c, s] : cells)
    if (cell_of(s.get()) == c && c->resident()) {
      if (!c->small) former_cells->push_back({WeakStorage(s), c->escape});
      unadopt(c);
    }
  cells.clear();
  {
    // A cell that could not be restored is lost with the tier: its slot must not be taken for one of a later tier.
    const Hold lock(graph_lock());
    for_each_cell_locked([](Cell* c) { c->slot = -1, c->given_up |= !c->resident(); });
  }
  Py_BEGIN_ALLOW_THREADS;
  drop_what_waits();
  stop_dropper();
  Py_END_ALLOW_THREADS;
  the_session.pool->uninstall();
  mm_arena_set_layout(the_session.arena, MM_REMAP_FIRST);
  if (the_session.tier) {
    finish_transfers(the_session);
    mm_tier_close(the_session.tier);
    the_session.tier = nullptr;
    the_session.tier_writes = false;
  }
  if (wrong) std::rethrow_exception(wrong);
}

// Returns the bytes of its cell, new or not; 0: it has none.
uint64_t py_adopt(Addressed o) {
  const StoragePtr s = storage_of(o.object);
  Cell* c = nullptr;
  if (s && the_session.open) {
    c = cell_of(s.get());
    if (!c && adoptable(the_session, s.get()) && s->nbytes() >= the_session.options.small_bytes)
      c = adopt(the_session, s.get());
  }
  return c ? c->nbytes : 0;
}

// Adopts these, the leaves' gradients, and the cells of earlier budgets. Returns their bytes. A gradient that another
// thread sets at the same time is adopted when an op touches it.
uint64_t py_adopt_all(TensorList tensors, bool stay) {
  the_session.adopted_stay = stay;
  const bool gradients = elsewhere() != Elsewhere::kGradients;
  std::vector<StoragePtr> found, others;
  const auto add = [&](const at::Tensor& t) {
    if (!t.defined() || !t.unsafeGetTensorImpl()->has_storage()) return;
    c10::StorageImpl* s = t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    if (the_session.pool->earlier()) grows_in_pool(the_session, s);  // small and empty ones, too
    if (is_small(the_session.options, s)) return;
    (adoptable(the_session, s) ? found : others).push_back(StoragePtr::reclaim_copy(s));
  };
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors.object); ++i) {
    PyObject* o = PyList_GET_ITEM(tensors.object, i);
    // Runs no code of the object.
    if (!PyType_IsSubtype(Py_TYPE(o), reinterpret_cast<PyTypeObject*>(THPVariableClass))) continue;
    const at::Tensor& t = THPVariable_Unpack(o);
    add(t);
    if (gradients && t.defined() && t.is_leaf()) add(t.grad());
    if (gradients && t.defined()) guard_hooks_of(the_session, t);
  }
  std::vector<std::pair<StoragePtr, Escape>> escaped;
  std::vector<FormerCell> kept;  // for a later budget: this one makes no cell of them
  for (FormerCell& former : *former_cells) {
    StoragePtr s = former.storage.lock();
    if (!s) continue;
    const bool outlives = outlives_budget(former.escape);
    if (adoptable(the_session, s.get()) && s->nbytes() >= the_session.options.small_bytes) {
      if (outlives) escaped.emplace_back(s, former.escape);
      found.push_back(std::move(s));
    } else if (outlives) {
      kept.push_back(std::move(former));
    }
  }
  *former_cells = std::move(kept);
  uint64_t bytes = 0;
  for (const StoragePtr& s : found)
    if (const Cell* c = adopt(the_session, s.get())) bytes += c->nbytes;
  if (stay)  // ops of other threads have made cells since the budget opened
    for (auto& [c, s] : all_cells())
      if (c->escape == Escape::kNone && !c->small) escaped.emplace_back(s, Escape::kOlderAddress);
  for (const StoragePtr& s : others) count_fixed(the_session, s.get());
  {
    const WithoutGil released;
    for (const auto& [s, why] : escaped)
      if (Cell* c = cell_of(s.get())) escape(c, why);
  }
  return bytes;
}

// Waits until no other thread is in an op or sets gradients; a second at most. True: none begins one before the caller
// releases the GIL.
bool others_rest() {
  for (int i = 0; i < 200; ++i) {
    give_others_a_moment();
    if (!others_are_in_their_ops() && elsewhere() != Elsewhere::kGradients && wait_until_kernel_is_left(0)) return true;
    const WithoutGil released;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

// Moves tensors from torch's own memory to the pool's. A tensor or storage with a reference that is not known here (a
// DLPack capsule, a reducer's bucket, a saved tensor) stays: its owner may have the address. All stay where another
// thread's ops do not end. Returns the bytes.
uint64_t py_move_in(TensorList tensors, List exported) {
  Pool* pool = the_session.pool;
  if (!the_session.open || !pool->earlier() || !others_rest()) return 0;
  std::unordered_set<const c10::StorageImpl*> stay;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(exported.object); ++i)
    stay.insert(storage_of(PyList_GET_ITEM(exported.object, i)).get());
  std::unordered_set<const c10::TensorImpl*> wrapped;
  std::unordered_map<const c10::TensorImpl*, size_t> references;
  std::unordered_map<c10::StorageImpl*, std::unordered_set<const c10::TensorImpl*>> users;
  const auto add = [&](const at::Tensor& t) {
    if (!t.defined() || !t.unsafeGetTensorImpl()->has_storage()) return false;
    references[t.unsafeGetTensorImpl()]++;
    users[t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()].insert(t.unsafeGetTensorImpl());
    return true;
  };
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors.object); ++i) {
    PyObject* o = PyList_GET_ITEM(tensors.object, i);
    if (!PyType_IsSubtype(Py_TYPE(o), reinterpret_cast<PyTypeObject*>(THPVariableClass))) continue;
    const at::Tensor& t = THPVariable_Unpack(o);  // Python's reference
    if (!wrapped.insert(t.unsafeGetTensorImpl()).second || !add(t)) continue;
    if (const auto* view = torch::autograd::impl::get_view_autograd_meta(t); view && view->has_bw_view())
      references[view->get_backward_view().base_.unsafeGetTensorImpl()]++;
    if (!t.is_leaf()) continue;
    add(t.grad());
    if (torch::autograd::impl::try_get_grad_accumulator(t)) references[t.unsafeGetTensorImpl()]++;
  }
  pool->settle();  // other streams write there
  uint64_t bytes = 0;
  for (const auto& [s, of] : users) {
    const size_t known = of.size() + (s->pyobj_slot()->load_pyobj() ? 1 : 0);  // Python's object of the storage
    if (is_small(the_session.options, s) || stay.count(s) || c10::raw::intrusive_ptr::use_count(s) != known) continue;
    const auto all_known = [&](const c10::TensorImpl* t) {
      return c10::raw::intrusive_ptr::use_count(const_cast<c10::TensorImpl*>(t)) == references[t];
    };
    if (std::all_of(of.begin(), of.end(), all_known) && move_into_pool(the_session, s)) bytes += s->nbytes();
  }
  pool->settle();  // and will read here
  pool->trim();
  return bytes;
}

// Evicts cells that were adopted past the limit. Returns the bytes that are still resident beyond it.
uint64_t py_settle() {
  uint64_t beyond = 0;
  give_others_a_moment();
  {
    const WithoutGil released;
    const uint64_t limit = mm_arena_budget(the_session.arena);
    for (int i = 0; i < 1000; ++i) {
      const uint64_t now = mm_arena_resident(the_session.arena);
      beyond = now > limit ? now - limit : 0;
      if (!beyond || !reclaim_callback(the_session.pool, beyond, beyond, i)) break;
    }
    the_session.pool->trim();
  }
  mm_arena_reset_peak(the_session.arena);  // the peak before the budget does not count
  return beyond;
}

void py_set_errors(Callable make, ExceptionType wrong, ExceptionType torchs) {
  set_error_classes(make.object, wrong.object, torchs.object);
}

void py_read_clock(uint64_t address) { read_clock(reinterpret_cast<uint64_t (*)()>(address)); }

void py_set_link(double seconds, double cpu) {
  set_link(seconds);
  if (cpu >= 0) set_link_cpu(cpu);
}

void py_set_slice_bytes(uint64_t bytes) { the_session.options.slice_bytes = bytes; }

void py_use_plugin(uint64_t table) { use_plugin(reinterpret_cast<const mm_plugin*>(table)); }

void bind_budget(Module& m) {
  m.def<&py_open>("open",
                  "*, limit, folder, disk_bytes, throttle, small_bytes, may_evict, may_offload, torture, verify, "
                  "prefetch, order, window, device, driver, host_bytes",
                  "Opens a budget.");
  m.def<&py_close>("close", "", "Restores all cells, leaves ordinary tensors and closes the budget.");
  m.def<&py_adopt>("adopt", "tensor", "The bytes of the tensor's cell, which is made if need be; 0: it has none.");
  m.def<&py_adopt_all>(
      "adopt_all", "tensors, stay=False",
      "Adopts these tensors, gradients of leaves among them and the cells of earlier budgets. The result "
      "is their bytes. `stay`: these, and storages that are adopted later, keep their addresses.");
  m.def<&py_move_in>("move_in", "tensors, exported",
                     "Moves tensors from the memory of torch's own allocator to the pool's, if nothing else refers to "
                     "their storages and they are not exported. The result is their bytes.");
  m.def<&py_settle>("settle", "", "Evicts cells beyond the limit. The result is the bytes that are still beyond it.");
  m.def<&py_set_errors>("set_errors", "make, wrong, torchs",
                        "`make` returns the exception for out of memory, of its text. `wrong` is the class for wrong "
                        "bytes, `torchs` torch's for out of memory.");
  m.def<&py_read_clock>("read_clock", "address", "The clock is the function at this address. For tests.");
  m.def<&count_ticks>("count_ticks", "step",
                      "Each look at the clock advances it by `step`; 0: the machine's clock. For tests.");
  m.def<&py_set_link>("set_link", "seconds_per_byte, cpu_seconds_per_byte=-1.0",
                      "The rates of the tier, one way, and of the processor time for it.");
  m.def<&py_set_slice_bytes>("set_slice_bytes", "most", "The limit of a slice until the budget ends. For tests.");
  m.def<&py_use_plugin>("use_plugin", "table", "The address of the table of CUDA's allocator.");
}

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_pager", "memmgr's pager", -1, nullptr, nullptr, nullptr, nullptr, nullptr};

void bind_all(PyObject* module) {
  PyTypeObject* pins = pin_class();
  if (!pins || PyModule_AddType(module, pins) != 0) throw python_error();
  Module m(module);
  bind_budget(m);
  bind_readers(m);
  bind_plans(m);
  bind_ranking(m);
  bind_figures(m);
  bind_births(m);
  bind_around(m);
  bind_gradients(m);
  bind_introspection(m);
  bind_pool(m);
  bind_descriptions(m);
  guard_new_hooks(the_session);
}

}  // namespace

}  // namespace memmgr::pager

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__pager() {
  using namespace memmgr::pager;
  PyObject* module = PyModule_Create(&definition);
  const PyObject* bound = module ? guarded([&] {
    bind_all(module);
    return module;
  })
                                 : nullptr;
  if (!bound) Py_CLEAR(module);
  return module;
}
