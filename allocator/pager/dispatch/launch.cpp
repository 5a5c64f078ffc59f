#include "dispatch/launch.h"

#include <dlfcn.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/clock.h"
#include "base/constants.h"
#include "base/errors.h"
#include "base/forked_child.h"
#include "base/gil.h"
#include "base/kernel_slots.h"
#include "base/lock.h"
#include "base/no_destructor.h"
#include "base/tensors.h"
#include "base/thread_state.h"
#include "base/wait.h"
#include "cells/adoption.h"
#include "cells/cell.h"
#include "concurrency/admission.h"
#include "concurrency/deferred_steps.h"
#include "dispatch/kernel.h"
#include "dispatch/op_need.h"
#include "dispatch/recording.h"
#include "dispatch/the_session.h"
#include "guards/collective_pins.h"
#include "guards/ddp_reducer.h"
#include "guards/extension_ops.h"
#include "guards/touched_cells.h"
#include "ops/op_info.h"
#include "plan/op_in_timeline.h"
#include "plan/timeline.h"
#include "pools/capturing.h"
#include "pools/pool.h"
#include "pools/scratch.h"
#include "pools/small_blocks.h"
#include "recipes/launch_recipe.h"
#include "residency/floor.h"

namespace memmgr::pager {

namespace {

struct Kernel {
  PyCFunction original;
  OpInfo* info;
  std::string args;  // one letter for each argument: a tensor that is read or written, or a number
};

// Kernels by the table of functions of their library. Python unloads no library, so an entry stays valid. It is not
// erased, because a launch may wait without the GIL while the budget closes. Guarded by the GIL.
NoDestructor<std::unordered_map<PyMethodDef*, Kernel>> kernels;

// Replays of other launches run without the GIL.
PyObject* run_kernel(const Kernel& kernel, PyObject* self, PyObject* args) {
  const Hold lock(lock_of(LockId::kLaunches));
  return kernel.original(self, args);
}

template <class F>
void for_each_tensor(const Kernel& kernel, PyObject* args, const F& visit) {
  const size_t n = std::min(kernel.args.size(), static_cast<size_t>(PyTuple_GET_SIZE(args)));
  for (size_t i = 0; i < n; ++i) {
    const char kind = kernel.args[i];
    PyObject* o = PyTuple_GET_ITEM(args, static_cast<Py_ssize_t>(i));
    if ((kind == kArgumentRead || kind == kArgumentWritten) && THPVariable_Check(o))
      visit(THPVariable_Unpack(o).unsafeGetTensorImpl(), kind == kArgumentWritten);
  }
}

void touch(const Kernel& kernel, PyObject* args, Frame* frame) {
  for_each_tensor(kernel, args, [&](c10::TensorImpl* t, bool written) { frame->tensor(t, written); });
}

// The recipe of a launch. Only launches in the compiled forward of a training have one.
class LaunchRecording {
 public:
  LaunchRecording(const Kernel& kernel, bool outermost)
      : kernel_(kernel),
        on_(tl_compiled_forward && outermost && kernel.info->function.load(std::memory_order_relaxed) && !tl_foreign &&
            !forked_child && !captures.load()) {}

  // Reads the arguments, before their tensors are touched. The bytes that the kernel writes over belong to versions.
  // The GIL is held.
  void read(PyObject* args) {
    if (C10_LIKELY(!on_)) return;
    on_ = read_arguments(args);
    for (const KernelArgument& a : arguments_) {
      if (!on_ || !a.written) continue;
      c10::StorageImpl* s = a.tensor->unsafe_storage().unsafeGetStorageImpl();
      if (!cell_of(s) && s->nbytes() < the_session.options.small_bytes && adoptable(the_session, s))
        adopt(the_session, s);
    }
  }

  // The cells are pinned, and nothing is written yet. The GIL may be free.
  void begin(const Frame& frame) {
    if (C10_LIKELY(!on_) || frame.bytes() == 0) return;
    recording_.begin(describe_launch(the_session, kernel_.info, arguments_));
    if (!recording_.recipe()) return;
    for (const KernelArgument& a : arguments_)
      if (a.written) note_written(a.tensor->unsafe_storage().unsafeGetStorageImpl());
    if (C10_UNLIKELY(recording_.is_new())) recording_.copy_written();
  }

  void give_up() {
    recording_.give_up();
    written_.clear();
  }

  // Called before the launch. A kernel of this signature leaves bytes of a new buffer unwritten: they are zeros.
  void clear_gaps() {
    if (C10_LIKELY(!recording_.recipe() || !recording_.recipe()->kind->clears.load(std::memory_order_relaxed))) return;
    size_t at = 0;
    for (const TensorArg& a : recording_.recipe()->tensors) {
      if (a.role == ArgumentRole::kFresh) std::memset(pointer_of(written_[at]).get(), 0, a.storage_bytes);
      at += a.role == ArgumentRole::kFresh || a.role == ArgumentRole::kWritten;
    }
  }

  // Called after the launch. The caller still has the pins.
  void end(double seconds) {
    if (C10_LIKELY(!recording_.recipe())) return;
    c10::SmallVector<Version*, 8> versions;
    c10::SmallVector<c10::StorageImpl*, 8> made;
    bool any = false;
    uint64_t bytes = 0;
    {
      const Hold lock(graph_lock());
      for (c10::StorageImpl* s : written_) {
        const Cell* c = cell_of(s);
        const bool large = c && !c->small;  // a small one stays in memory
        versions.push_back(large ? c->version : nullptr);
        made.push_back(large ? s : nullptr);
        any |= large;
        bytes += s->nbytes();
      }
    }
    if (!any) return recording_.give_up();
    recording_.note_run(seconds);
    recording_.check(made, bytes);
    recording_.attach_if_trusted(versions);
  }

 private:
  // False: the launch cannot be recorded, or its kernel raises an error.
  bool read_arguments(PyObject* args) {
    const auto n = static_cast<size_t>(PyTuple_GET_SIZE(args));
    if (n != kernel_.args.size()) return false;
    for (size_t i = 0; i < n; ++i) {
      PyObject* o = PyTuple_GET_ITEM(args, static_cast<Py_ssize_t>(i));
      KernelArgument& a = arguments_.emplace_back();
      a.written = kernel_.args[i] == kArgumentWritten;
      if (kernel_.args[i] != kArgumentNumber) {
        if (!THPVariable_Check(o) || !THPVariable_Unpack(o).has_storage()) return false;
        a.tensor = THPVariable_Unpack(o).unsafeGetTensorImpl();
        continue;
      }
      if (!PyLong_CheckExact(o)) return false;
      int overflow = 0;
      a.number = PyLong_AsLongLongAndOverflow(o, &overflow);
      if (overflow) return false;
    }
    return true;
  }

  // In the order of the recipe's tensors that are written.
  void note_written(c10::StorageImpl* s) {
    if (std::find(written_.begin(), written_.end(), s) == written_.end() && s->nbytes() > 0) written_.push_back(s);
  }

  const Kernel& kernel_;
  bool on_;
  c10::SmallVector<KernelArgument, 12> arguments_;
  Recording recording_;
  c10::SmallVector<c10::StorageImpl*, 8> written_;
};

// Restores and pins the kernel's tensors, and gives the written ones a new version.
void prepare(const Kernel& kernel, PyObject* args, bool outermost, Frame* frame, std::optional<Admitted>* admitted,
             LaunchRecording* recording) {
  bool alone = false;
  for (int pauses = 0;;) {
    const bool newborns_before = others_have_newborns();  // a newborn that ends from now on frees room
    try {
      if (outermost && !forked_child) admitted->emplace(the_session, frame->bytes(), alone);
      std::optional<WithoutGil> released;
      for (const Touched& t : frame->cells())
        if (C10_UNLIKELY(!t.cell->resident()) && !released) released.emplace();
      frame->pin_all();
      recording->begin(*frame);
      frame->begin_writes();
      return;
    } catch (const c10::OutOfMemoryError&) {
      recording->give_up();
      const bool last = alone && (++pauses > kMostPauses || !(newborns_before || others_have_newborns()));
      if (last || !outermost) throw;
      alone = true;
      the_session.counters.retries++;
    }
    frame->release();
    admitted->reset();
    if (pauses > 0) wait_for_others(kPauseSeconds);  // until other threads' newborns can be evicted
    touch(kernel, args, frame);
  }
}

PyObject* page(const Kernel& kernel, PyObject* self, PyObject* args, Moment* moment) {
  const Depth depth;
  std::optional<Admitted> admitted;  // ends after the pins
  Frame frame(the_session);
  frame.may_wait(depth.outermost());
  LaunchRecording recording(kernel, depth.outermost());
  recording.read(args);
  touch(kernel, args, &frame);
  if (works_in_flight()) poll_works();
  if (frame.empty() && !frame.writes()) return run_kernel(kernel, self, args);
  if (C10_UNLIKELY(moment != nullptr) && !frame.empty()) moment->begins(kernel.info, frame);
  prepare(kernel, args, depth.outermost(), &frame, &admitted, &recording);
  recording.clear_gaps();
  const uint64_t& waited = waited_ns();
  const uint64_t stalled = waited, begun = ticks();
  if (depth.outermost()) taking().begin_scratch();
  PyObject* result = run_kernel(kernel, self, args);
  double seconds = seconds_of_ticks(ticks() - begun);
  if (const uint64_t stall = waited - stalled) seconds = std::max(1e-7, seconds - static_cast<double>(stall) * 1e-9);
  if (depth.outermost() && frame.bytes() > 0)
    note_working_set(the_session, frame.cells().size(), [&](size_t i) { return frame.cells()[i].cell; });
  frame.end_newborns();
  if (!result) return nullptr;
  recording.end(seconds);
  if (C10_UNLIKELY(moment != nullptr)) moment->ended(kernel.info, nullptr, 0, seconds, 0);
  if (C10_UNLIKELY(tl_foreign != nullptr)) tl_foreign->keep(frame);
  if (C10_UNLIKELY(reducers_listening.load(std::memory_order_relaxed))) keep_accumulated(frame);
  if (C10_UNLIKELY(the_session.options.torture) && depth.outermost()) evict_touched(&frame, true);
  return result;
}

PyObject* paged(const Kernel& kernel, PyObject* self, PyObject* args) {
  if (C10_UNLIKELY(pending_slices.load(std::memory_order_relaxed) > 0))
    for_each_tensor(kernel, args, [](c10::TensorImpl* t, bool) {
      each_storage(t, [](c10::StorageImpl* s) { finish_pending_of(the_session, s); });
    });
  if (C10_LIKELY(!timeline_on.load(std::memory_order_relaxed)) || tl_depth > 0 || tl_running_recipes > 0)
    return page(kernel, self, args, nullptr);
  Moment moment(the_session);
  PyObject* result = page(kernel, self, args, &moment);
  moment.left();
  return result;
}

// Replaces the kernel's C function while a budget is open.
PyObject* launch(PyObject* self, PyObject* args) {
  const Kernel& kernel = kernels->find(PyModule_GetDef(self)->m_methods)->second;
  std::optional<InKernel> inside;
  if (C10_LIKELY(the_session.open.load(std::memory_order_relaxed))) inside.emplace();
  // In a region the kernel's tensors are pinned already.
  if (C10_UNLIKELY(!inside || !the_session.open.load(std::memory_order_acquire) || tl_regions > 0)) {
    inside.reset();
    return run_kernel(kernel, self, args);
  }
  inside->count_op();
  return guarded([&] {
    try {
      return paged(kernel, self, args);
    } catch (const c10::OutOfMemoryError&) {
      std::vector<c10::TensorImpl*> tensors;
      for_each_tensor(kernel, args, [&](c10::TensorImpl* t, bool) { tensors.push_back(t); });
      note_need(kernel.info->name(), tensors);
      throw;
    }
  });
}

// Returns the table of functions of the library that holds the kernel. Null: the function is not from Inductor's
// binding.
PyMethodDef* table_of(PyObject* function) {
  PyObject* self = PyCFunction_CheckExact(function) ? PyCFunction_GET_SELF(function) : nullptr;
  const PyModuleDef* module = self && PyModule_CheckExact(self) ? PyModule_GetDef(self) : nullptr;
  PyMethodDef* def = self ? reinterpret_cast<PyCFunctionObject*>(function)->m_ml : nullptr;
  return module && module->m_methods == def && def->ml_flags == METH_VARARGS ? def : nullptr;
}

// The function that allocates a compiled graph's buffers on the CPU, without an op. Guarded by the GIL.
struct Buffers {
  PyMethodDef* def = nullptr;  // null: it was never replaced
  PyCFunction original = nullptr;
};
Buffers& buffers() {
  static Buffers b;
  return b;
}

// Allocates a buffer. Waits for other threads whose buffers or ops take the room.
PyObject* allocate_or_wait(PyObject* self, PyObject* args) {
  for (int pauses = 0;; ++pauses) {
    const bool others = others_have_newborns() || others_are_running(false);
    PyObject* made = buffers().original(self, args);
    if (C10_LIKELY(made) || !python_found_no_room() || tl_depth > 0 || pauses == kMostPauses) return made;
    if (!others && !others_have_newborns()) return nullptr;
    PyErr_Clear();
    the_session.counters.retries++;
    const WithoutGil released;
    wait_for_others(kPauseSeconds);
  }
}

// A large buffer is a cell from its beginning, pinned until a launch or an op has touched it. So is a small one in the
// forward of a training: a recipe may then write to it without its old bytes.
void begin_buffer(c10::StorageImpl* s) {
  const bool large = s->nbytes() >= least_born_bytes.load(std::memory_order_relaxed);
  if (!(large || tl_compiled_forward) || cell_of(s) || !adoptable(the_session, s)) return;
  const Hold lock(graph_lock());
  Cell* c = adopt_locked(the_session, s, 0, ticks(), large);
  if (!c) return;
  c->blank_in = tl_compiled_graph;
  if (c->small)
    c->version->uninitialized = true;
  else
    begin_newborn_locked(c);
}

// Replaces the function that allocates buffers while a budget is open.
PyObject* allocate(PyObject* self, PyObject* args) {
  std::optional<InKernel> inside;
  if (C10_LIKELY(the_session.open.load(std::memory_order_relaxed))) inside.emplace();
  // The buffers of a region are pinned as a whole, and C++ may write to them unseen.
  if (C10_UNLIKELY(!inside || !the_session.open.load(std::memory_order_acquire) || tl_regions > 0 || tl_foreign)) {
    inside.reset();
    return buffers().original(self, args);
  }
  return guarded([&]() -> PyObject* {
    PyObject* made = allocate_or_wait(self, args);
    if (made && THPVariable_Check(made) && THPVariable_Unpack(made).has_storage())
      begin_buffer(THPVariable_Unpack(made).unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    return made;
  });
}

}  // namespace

// Returns the function in C that the binding calls. It has the binding's name, in the same library. Null: there is
// none.
static void* function_behind(const PyMethodDef* def) {
  Dl_info found;
  if (!dladdr(reinterpret_cast<void*>(def->ml_meth), &found)) return nullptr;
  void* library = dlopen(found.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return nullptr;
  void* function = dlsym(library, def->ml_name);
  dlclose(library);  // Python keeps it loaded
  return function;
}

bool page_kernel(PyObject* function, const std::string& key, const std::string& name, const std::string& args,
                 bool repeats) {
  PyMethodDef* def = table_of(function);
  if (!def) return false;
  if (def->ml_meth != &launch) {
    OpInfo* info = info_of_kernel(key, name);
    // A library that was loaded before with the same source stays loaded, and recipes may call it.
    if (repeats && args.size() <= kMostKernelArguments && !info->function) info->function = function_behind(def);
    // A launch of an earlier budget may still read its entry.
    kernels->try_emplace(def, Kernel{def->ml_meth, info, args});
    def->ml_meth = &launch;
  }
  return true;
}

void unpage_kernels() {
  for (auto& [def, kernel] : *kernels) def->ml_meth = kernel.original;
  if (Buffers& b = buffers(); b.def) b.def->ml_meth = b.original;
}

bool page_buffers(PyObject* function) {
  if (!PyCFunction_CheckExact(function)) return false;
  PyMethodDef* def = reinterpret_cast<PyCFunctionObject*>(function)->m_ml;
  if (def->ml_flags != METH_VARARGS) return false;
  Buffers& b = buffers();
  if (def->ml_meth != &allocate) b = {def, def->ml_meth};
  def->ml_meth = &allocate;
  return true;
}

PyObject* call_graph(PyObject* function, PyObject* args, PyObject* kwargs, bool forward) {
  static std::atomic<uint64_t> calls{0};
  struct Inside {
    const uint64_t graph = tl_compiled_graph, forward = tl_compiled_forward;
    ~Inside() {
      tl_compiled_graph = graph;
      tl_compiled_forward = forward;
    }
  } const before;
  tl_compiled_graph = ++calls;
  if (forward) tl_compiled_forward = tl_compiled_graph;
  return PyObject_Call(function, args, kwargs);
}

}  // namespace memmgr::pager
