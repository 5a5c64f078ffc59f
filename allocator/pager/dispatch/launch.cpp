#include "dispatch/launch.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <list>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/clock.h"
#include "base/errors.h"
#include "base/forked_child.h"
#include "base/gil.h"
#include "base/kernel_slots.h"
#include "base/lock.h"
#include "base/no_destructor.h"
#include "base/tensors.h"
#include "base/thread_state.h"
#include "base/wait.h"
#include "cells/cell.h"
#include "cells/check_graph.h"
#include "cells/stream_order.h"
#include "concurrency/admission.h"
#include "concurrency/deferred_steps.h"
#include "dispatch/kernel.h"
#include "dispatch/launch_recording.h"
#include "dispatch/op_need.h"
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
#include "recipes/launch_recipe.h"
#include "residency/floor.h"

namespace memmgr::pager {

namespace {

// Kernels in C++ by the table of functions of their library. Python unloads no library, so an entry stays valid. It is
// not erased, because a launch may wait without the GIL while the budget closes. Guarded by the GIL.
NoDestructor<std::unordered_map<PyMethodDef*, LaunchedKernel>> kernels;

void touch(const LaunchedKernel& kernel, Positional args, Frame* frame) {
  for_each_tensor(kernel, args, [&](c10::TensorImpl* t, bool written) { frame->tensor(t, written); });
}

// Restores and pins the kernel's tensors, and gives the written ones a new version.
void prepare(const LaunchedKernel& kernel, Positional args, bool outermost, Frame* frame,
             std::optional<Admitted>* admitted, LaunchRecording* recording) {
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
PyObject* page(const LaunchedKernel& kernel, Positional args, LaunchBody run, Moment* moment) {
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

PyObject* paged(const LaunchedKernel& kernel, Positional args, LaunchBody run) {
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

PyObject* captured(const LaunchedKernel& kernel, Positional args, LaunchBody run) {
  const Depth depth;
  Frame frame(the_session);
  touch(kernel, args, &frame);
  keep_captured(&frame);
  return run(&frame);
}

}  // namespace

PyObject* launch(const LaunchedKernel& kernel, Positional args, LaunchBody run) {
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

namespace {

// Replaces a C++ kernel's function while a budget is open. Replays of other launches run without the GIL.
PyObject* launch_function(PyObject* self, PyObject* args) {
  const LaunchedKernel& kernel = kernels->find(PyModule_GetDef(self)->m_methods)->second;
  const Positional items(&PyTuple_GET_ITEM(args, 0), static_cast<size_t>(PyTuple_GET_SIZE(args)));
  return launch(kernel, items, [&](const Frame*) {
    const Hold lock(lock_of(LockId::kLaunches));
    return kernel.original(self, args);
  });
}

// A Triton kernel: the object that replaces its `run` has one.
struct Launcher {
  LaunchedKernel kernel;
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
    kernels->try_emplace(def, LaunchedKernel{info, args, def->ml_meth});
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
}

}  // namespace memmgr::pager
