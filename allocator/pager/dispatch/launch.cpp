#include "dispatch/launch.h"

#include <dlfcn.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <list>
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
#include "cells/check_graph.h"
#include "cells/stream_order.h"
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
  OpInfo* info;
  std::string args;                // one letter for each argument: a tensor that is read or written, or a number
  PyCFunction original = nullptr;  // of a kernel in C++
};

// Kernels in C++ by the table of functions of their library. Python unloads no library, so an entry stays valid. It is
// not erased, because a launch may wait without the GIL while the budget closes. Guarded by the GIL.
NoDestructor<std::unordered_map<PyMethodDef*, Kernel>> kernels;

// The positional arguments of a launch.
using Positional = c10::ArrayRef<PyObject*>;

// A tensor beyond the letters is written.
template <class F>
void for_each_tensor(const Kernel& kernel, Positional args, const F& visit) {
  for (size_t i = 0; i < args.size(); ++i)
    if (THPVariable_Check(args[i]))
      visit(THPVariable_Unpack(args[i]).unsafeGetTensorImpl(),
            i >= kernel.args.size() || kernel.args[i] != kArgumentRead);
}

void touch(const Kernel& kernel, Positional args, Frame* frame) {
  for_each_tensor(kernel, args, [&](c10::TensorImpl* t, bool written) { frame->tensor(t, written); });
}

// The recipe of a launch. Only launches in the compiled forward of a training have one.
class LaunchRecording {
 public:
  LaunchRecording(const Kernel& kernel, bool outermost)
      : kernel_(kernel),
        on_(tl_compiled_forward && outermost &&
            (kernel.info->function.load(std::memory_order_relaxed) ||
             kernel.info->run.load(std::memory_order_relaxed)) &&
            !tl_foreign && !forked_child && !captures.load()) {}

  // Reads the arguments, before their tensors are touched. The bytes that the kernel writes over belong to versions.
  // The GIL is held.
  void read(Positional args) {
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
    // Only the host clears gaps before a launch.
    if (!the_session.pool->on_host() && recording_.recipe()->kind->clears.load(std::memory_order_relaxed))
      return recording_.give_up();
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

  // Called after the launch, with its time on the host. The caller still has the pins. Returns the kernel's time.
  double end(double seconds) {
    if (C10_LIKELY(!recording_.recipe())) return seconds;
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
    if (!any) {
      recording_.give_up();
      return seconds;
    }
    recording_.note_run(seconds);
    recording_.check(made, bytes);
    // A queued launch has hardly begun: the determinism check has timed it.
    if (queues) seconds = std::max(seconds, recording_.recipe()->kind->seconds.load(std::memory_order_relaxed));
    recording_.attach_if_trusted(versions);
    return seconds;
  }

 private:
  // False: the launch cannot be recorded, or its kernel raises an error.
  bool read_arguments(Positional args) {
    if (args.size() != kernel_.args.size()) return false;
    for (size_t i = 0; i < args.size(); ++i) {
      PyObject* o = args[i];
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
void prepare(const Kernel& kernel, Positional args, bool outermost, Frame* frame, std::optional<Admitted>* admitted,
             LaunchRecording* recording) {
  bool alone = false;
  SeenNewborns newborns;
  for (int pauses = 0;;) {
    newborns.look();
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
      const bool last = alone && (++pauses > kMostPauses || !newborns.may_free_room());
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

// The Triton launch that runs in this thread. Its code is Python's, and may ask for addresses.
struct RunningLaunch {
  explicit RunningLaunch(const Frame* frame) : touched(frame), outer(innermost) { innermost = this; }
  ~RunningLaunch() { innermost = outer; }
  RunningLaunch(const RunningLaunch&) = delete;
  RunningLaunch& operator=(const RunningLaunch&) = delete;

  // Pins the cell until the launch ends. Its first launch tries several variants of the kernel, on copies of tensors.
  void keep(Cell* c, c10::StorageImpl* s) {
    for (const Touched& t : touched->cells())
      if (t.cell == c) return;
    Frame& more = others.emplace_back(the_session);
    more.storage(s, true);
    std::optional<WithoutGil> released;
    if (!c->resident()) released.emplace();
    more.pin_all();
    more.begin_writes();
    more.end_newborns();
  }

  const Frame* const touched;
  RunningLaunch* const outer;
  std::list<Frame> others;
  static thread_local RunningLaunch* innermost;
};
thread_local RunningLaunch* RunningLaunch::innermost = nullptr;

// `run` launches the kernel while the tensors of a frame are pinned, and returns null after an error of Python's.
template <class Run>
PyObject* page(const Kernel& kernel, Positional args, const Run& run, Moment* moment) {
  follow_stream();
  const Depth depth;
  std::optional<Admitted> admitted;  // ends after the pins
  Frame frame(the_session);
  frame.may_wait(depth.outermost());
  LaunchRecording recording(kernel, depth.outermost());
  recording.read(args);
  touch(kernel, args, &frame);
  if (works_in_flight()) poll_works();
  if (frame.empty() && !frame.writes()) return run(&frame);
  if (C10_UNLIKELY(moment != nullptr) && !frame.empty()) moment->begins(kernel.info, frame);
  prepare(kernel, args, depth.outermost(), &frame, &admitted, &recording);
  recording.clear_gaps();
  const uint64_t& waited = waited_ns();
  const uint64_t stalled = waited;
  OpTimer timer;
  if (C10_UNLIKELY(times_ops.load(std::memory_order_relaxed)) && depth.outermost())
    timer.begin(*the_session.pool, kernel.info);
  const uint64_t begun = ticks();
  if (depth.outermost()) taking().begin_scratch();
  PyObject* result = run(&frame);
  double seconds = seconds_of_ticks(ticks() - begun);
  timer.end();
  if (const uint64_t stall = waited - stalled) seconds = std::max(1e-7, seconds - static_cast<double>(stall) * 1e-9);
  if (depth.outermost() && frame.bytes() > 0)
    note_working_set(the_session, frame.cells().size(), [&](size_t i) { return frame.cells()[i].cell; });
  frame.end_newborns();
  if (C10_UNLIKELY(queues)) note_queued(frame.bytes());
  if (!result) return nullptr;
  seconds = recording.end(seconds);
  if (C10_UNLIKELY(moment != nullptr)) moment->ended(kernel.info, nullptr, 0, seconds, 0, &timer);
  if (C10_UNLIKELY(tl_foreign != nullptr)) tl_foreign->keep(frame);
  if (C10_UNLIKELY(reducers_listening.load(std::memory_order_relaxed))) keep_accumulated(frame);
  if (C10_UNLIKELY(the_session.options.torture) && depth.outermost()) evict_touched(&frame, true);
  return result;
}

template <class Run>
PyObject* paged(const Kernel& kernel, Positional args, const Run& run) {
  if (C10_UNLIKELY(pending_slices.load(std::memory_order_relaxed) > 0))
    for_each_tensor(kernel, args, [](c10::TensorImpl* t, bool) {
      each_storage(t, [](c10::StorageImpl* s) { finish_pending_of(the_session, s); });
    });
  if (tl_depth > 0 || tl_running_recipes > 0) return page(kernel, args, run, nullptr);
  PyObject* result = nullptr;
  if (C10_LIKELY(!timeline_on.load(std::memory_order_relaxed))) {
    result = page(kernel, args, run, nullptr);
  } else {
    Moment moment(the_session);
    result = page(kernel, args, run, &moment);
    moment.left();
  }
  if (C10_UNLIKELY(checks_graph.load(std::memory_order_relaxed)) && result) check_graph_after_op();
  return result;
}

template <class Run>
PyObject* captured(const Kernel& kernel, Positional args, const Run& run) {
  const Depth depth;
  Frame frame(the_session);
  touch(kernel, args, &frame);
  keep_captured(&frame);
  return run(&frame);
}

template <class Run>
PyObject* launch(const Kernel& kernel, Positional args, const Run& run) {
  std::optional<InKernel> inside;
  if (C10_LIKELY(the_session.open.load(std::memory_order_relaxed))) inside.emplace();
  // In a region the kernel's tensors are pinned already.
  if (C10_UNLIKELY(!inside || !the_session.open.load(std::memory_order_acquire) || tl_regions > 0)) {
    inside.reset();
    return run(nullptr);
  }
  inside->count_op();
  return guarded([&] {
    try {
      if (C10_UNLIKELY(captures.load(std::memory_order_relaxed) > 0) && is_capturing(*the_session.pool))
        return captured(kernel, args, run);
      return paged(kernel, args, run);
    } catch (const c10::OutOfMemoryError&) {
      std::vector<c10::TensorImpl*> tensors;
      for_each_tensor(kernel, args, [&](c10::TensorImpl* t, bool) { tensors.push_back(t); });
      note_need(kernel.info->name(), tensors);
      throw;
    }
  });
}

// Replaces a C++ kernel's function while a budget is open. Replays of other launches run without the GIL.
PyObject* launch_function(PyObject* self, PyObject* args) {
  const Kernel& kernel = kernels->find(PyModule_GetDef(self)->m_methods)->second;
  const Positional items(&PyTuple_GET_ITEM(args, 0), static_cast<size_t>(PyTuple_GET_SIZE(args)));
  return launch(kernel, items, [&](const Frame*) {
    const Hold lock(lock_of(LockId::kLaunches));
    return kernel.original(self, args);
  });
}

// A Triton kernel: the object that replaces its `run` has one.
struct Launcher {
  Kernel kernel;
  PyObject* run;
};

// `self`: a capsule with the Launcher. Values of keywords follow the `n` positional arguments.
PyObject* launch_by(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* names) {
  const auto* by = static_cast<const Launcher*>(PyCapsule_GetPointer(self, nullptr));
  if (!by) return nullptr;
  Positional all(const_cast<PyObject**>(args), static_cast<size_t>(n + (names ? PyTuple_GET_SIZE(names) : 0)));
  const Positional keywords = all.slice(static_cast<size_t>(n));
  const bool with_tensor =
      std::any_of(keywords.begin(), keywords.end(), [](PyObject* o) { return THPVariable_Check(o); });
  return launch(by->kernel, with_tensor ? all : all.slice(0, static_cast<size_t>(n)), [&](const Frame* frame) {
    std::optional<RunningLaunch> running;
    if (frame) running.emplace(frame);
    return PyObject_Vectorcall(by->run, args, static_cast<size_t>(n), names);
  });
}

PyMethodDef launcher_def = {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&launch_by)),
                            METH_FASTCALL | METH_KEYWORDS, nullptr};

// Returns the table of functions of the library that holds the kernel. Null: the function is not from Inductor's
// binding.
PyMethodDef* table_of(PyObject* function) {
  PyObject* self = PyCFunction_CheckExact(function) ? PyCFunction_GET_SELF(function) : nullptr;
  const PyModuleDef* module = self && PyModule_CheckExact(self) ? PyModule_GetDef(self) : nullptr;
  PyMethodDef* def = self ? reinterpret_cast<PyCFunctionObject*>(function)->m_ml : nullptr;
  return module && module->m_methods == def && def->ml_flags == METH_VARARGS ? def : nullptr;
}

// A function in C of torch's that compiled graphs call without an op, while another is in its place. Guarded by the
// GIL.
struct Replaced {
  PyMethodDef* def = nullptr;  // null: it was never replaced
  PyCFunction original = nullptr;

  // False: it is no function in C with these arguments (METH_...).
  bool replace(PyObject* function, int arguments, PyCFunction by) {
    if (!PyCFunction_CheckExact(function)) return false;
    PyMethodDef* found = reinterpret_cast<PyCFunctionObject*>(function)->m_ml;
    if (found->ml_flags != arguments) return false;
    if (found->ml_meth != by) *this = {found, found->ml_meth};
    found->ml_meth = by;
    return true;
  }
  void put_back() const {
    if (def) def->ml_meth = original;
  }
};

struct GraphFunctions {
  Replaced buffers;          // allocates a buffer on the budget's device
  Replaced alignment_check;  // copies an input whose address is not aligned as the graph's kernels need it
};
GraphFunctions& graph_functions() {
  static GraphFunctions f;
  return f;
}

// Allocates a buffer. Waits for other threads whose buffers or ops take the room.
PyObject* allocate_or_wait(PyObject* self, PyObject* args) {
  for (int pauses = 0;; ++pauses) {
    const bool others = others_have_newborns() || others_are_running(false);
    PyObject* made = graph_functions().buffers.original(self, args);
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
    return graph_functions().buffers.original(self, args);
  }
  return guarded([&]() -> PyObject* {
    PyObject* made = allocate_or_wait(self, args);
    if (made && THPVariable_Check(made) && THPVariable_Unpack(made).has_storage())
      begin_buffer(THPVariable_Unpack(made).unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    return made;
  });
}

// Blocks of the pool are aligned to more than any kernel needs, so only the place in its block decides about a tensor,
// and an absent one stays absent. Memory from before the budget may have another alignment.
bool is_aligned(const c10::TensorImpl* t, const Cell* c) {
  constexpr int64_t kAlignment = 64;
  return (!c->outside || !c->resident()) && t->storage_offset() * static_cast<int64_t>(t->itemsize()) % kAlignment == 0;
}

// Replaces the function that checks inputs while a budget is open. Its copy of an input is made as a launch.
PyObject* check_alignment(PyObject* self, PyObject* input) {
  static const Kernel copy{info_of_kernel("copy_if_misaligned", "inductor::copy_if_misaligned"),
                           std::string(1, kArgumentRead)};
  {
    std::optional<InKernel> inside;
    if (C10_LIKELY(the_session.open.load(std::memory_order_relaxed))) inside.emplace();
    const c10::TensorImpl* t =
        inside && THPVariable_Check(input) ? THPVariable_Unpack(input).unsafeGetTensorImpl() : nullptr;
    const Cell* c = t && t->has_storage() ? cell_of(t->unsafe_storage().unsafeGetStorageImpl()) : nullptr;
    if (C10_LIKELY(c && the_session.open.load(std::memory_order_acquire) && is_aligned(t, c))) return Py_NewRef(input);
  }
  return launch(copy, input, [&](const Frame*) { return graph_functions().alignment_check.original(self, input); });
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
  if (def->ml_meth != &launch_function) {
    OpInfo* info = info_of_kernel(key, name);
    // A library that was loaded before with the same source stays loaded, and recipes may call it.
    if (repeats && args.size() <= kMostKernelArguments && !info->function) info->function = function_behind(def);
    // A launch of an earlier budget may still read its entry.
    kernels->try_emplace(def, Kernel{info, args, def->ml_meth});
    def->ml_meth = &launch_function;
  }
  return true;
}

PyObject* paged_run(PyObject* run, const std::string& key, const std::string& name, const std::string& args,
                    bool repeats) {
  OpInfo* info = info_of_kernel(key, name);
  // Recipes of an earlier budget, which read another one, have ended.
  PyObject* again = repeats && args.size() <= kMostKernelArguments ? Py_NewRef(run) : nullptr;
  Py_XDECREF(info->run.exchange(again));
  auto* by = new Launcher{{info, args}, Py_NewRef(run)};
  PyObject* self = PyCapsule_New(by, nullptr, [](PyObject* capsule) {
    auto* ended = static_cast<Launcher*>(PyCapsule_GetPointer(capsule, nullptr));
    Py_DECREF(ended->run);
    delete ended;
  });
  PyObject* made = self ? PyCFunction_New(&launcher_def, self) : nullptr;
  Py_XDECREF(self);  // `made` has it
  return made;
}

bool in_launch(c10::StorageImpl* s) {
  RunningLaunch* launch = RunningLaunch::innermost;
  if (Cell* c = launch && s ? cell_of(s) : nullptr) launch->keep(c, s);
  return launch != nullptr || tl_running_recipes > 0;  // a replay's tensors are no cells
}

void unpage_kernels() {
  for (auto& [def, kernel] : *kernels) def->ml_meth = kernel.original;
  graph_functions().buffers.put_back();
  graph_functions().alignment_check.put_back();
}

bool page_buffers(PyObject* function) { return graph_functions().buffers.replace(function, METH_VARARGS, &allocate); }

bool page_alignment_check(PyObject* function) {
  return graph_functions().alignment_check.replace(function, METH_O, &check_alignment);
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
