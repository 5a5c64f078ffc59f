#include "dispatch/launch.h"

#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <string>
#include <unordered_map>

#include "base/budget.h"
#include "base/clock.h"
#include "base/constants.h"
#include "base/errors.h"
#include "base/gil.h"
#include "base/kernel_slots.h"
#include "base/tensors.h"
#include "base/thread_state.h"
#include "base/wait.h"
#include "cells/cell.h"
#include "concurrency/admission.h"
#include "concurrency/deferred_steps.h"
#include "dispatch/kernel.h"
#include "dispatch/op_need.h"
#include "guards/collective_pins.h"
#include "guards/ddp_reducer.h"
#include "guards/extension_ops.h"
#include "guards/touched_cells.h"
#include "ops/op_info.h"
#include "plan/op_in_timeline.h"
#include "plan/timeline.h"
#include "pools/scratch.h"
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
std::unordered_map<PyMethodDef*, Kernel>& kernels() {
  static auto* k = new std::unordered_map<PyMethodDef*, Kernel>;
  return *k;
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

// Restores and pins the kernel's tensors, and gives the written ones a new version.
void prepare(const Kernel& kernel, PyObject* args, bool outermost, Frame* frame, std::optional<Admitted>* admitted) {
  bool alone = false;
  for (int pauses = 0;;) {
    const bool newborns_before = others_have_newborns();  // a newborn that ends from now on frees room
    try {
      if (outermost && !budget.forked) admitted->emplace(frame->bytes(), alone);
      std::optional<WithoutGil> released;
      for (const Touched& t : frame->cells())
        if (C10_UNLIKELY(!t.cell->resident()) && !released) released.emplace();
      frame->pin_all();
      frame->begin_writes();
      return;
    } catch (const c10::OutOfMemoryError&) {
      const bool last = alone && (++pauses > kMostPauses || !(newborns_before || others_have_newborns()));
      if (last || !outermost) throw;
      alone = true;
      counters.retries++;
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
  Frame frame;
  frame.may_wait(depth.outermost());
  touch(kernel, args, &frame);
  if (works_in_flight()) poll_works();
  if (frame.empty() && !frame.writes()) return kernel.original(self, args);
  if (C10_UNLIKELY(moment != nullptr) && !frame.empty()) moment->begins(kernel.info, frame);
  prepare(kernel, args, depth.outermost(), &frame, &admitted);
  const uint64_t& waited = waited_ns();
  const uint64_t stalled = waited, begun = ticks();
  if (depth.outermost()) taking().begin_scratch();
  PyObject* result = kernel.original(self, args);
  double seconds = seconds_of_ticks(ticks() - begun);
  if (const uint64_t stall = waited - stalled) seconds = std::max(1e-7, seconds - static_cast<double>(stall) * 1e-9);
  if (depth.outermost() && frame.bytes() > 0)
    note_working_set(frame.cells().size(), [&](size_t i) { return frame.cells()[i].cell; });
  frame.end_newborns();
  if (!result) return nullptr;
  if (C10_UNLIKELY(moment != nullptr)) moment->ended(kernel.info, nullptr, 0, seconds, 0);
  if (C10_UNLIKELY(tl_foreign != nullptr)) tl_foreign->keep(frame);
  if (C10_UNLIKELY(reducers_listening.load(std::memory_order_relaxed))) keep_accumulated(frame);
  if (C10_UNLIKELY(budget.options.torture) && depth.outermost()) send_away(&frame, true);
  return result;
}

PyObject* paged(const Kernel& kernel, PyObject* self, PyObject* args) {
  if (C10_UNLIKELY(pending_slices.load(std::memory_order_relaxed) > 0))
    for_each_tensor(kernel, args, [](c10::TensorImpl* t, bool) {
      each_storage(t, [](c10::StorageImpl* s) { finish_pending_of(s); });
    });
  if (C10_LIKELY(!timeline_on.load(std::memory_order_relaxed)) || tl_depth > 0 || tl_running_recipes > 0)
    return page(kernel, self, args, nullptr);
  Moment moment;
  PyObject* result = page(kernel, self, args, &moment);
  moment.left();
  return result;
}

// Replaces the kernel's C function while a budget is open.
PyObject* launch(PyObject* self, PyObject* args) {
  const Kernel& kernel = kernels().find(PyModule_GetDef(self)->m_methods)->second;
  std::optional<InKernel> inside;
  if (C10_LIKELY(budget.open.load(std::memory_order_relaxed))) inside.emplace();
  // In a region the kernel's tensors are pinned already.
  if (C10_UNLIKELY(!inside || !budget.open.load(std::memory_order_acquire) || tl_regions > 0)) {
    inside.reset();
    return kernel.original(self, args);
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

}  // namespace

bool page_kernel(PyObject* function, const std::string& key, const std::string& name, const std::string& args) {
  PyMethodDef* def = table_of(function);
  if (!def) return false;
  if (def->ml_meth != &launch) {
    kernels()[def] = {def->ml_meth, info_of_kernel(key, name), args};
    def->ml_meth = &launch;
  }
  return true;
}

void unpage_kernels() {
  for (auto& [def, kernel] : kernels()) def->ml_meth = kernel.original;
}

}  // namespace memmgr::pager
