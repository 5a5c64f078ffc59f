#include "dispatch/graph_functions.h"

#include <torch/csrc/autograd/python_variable.h>

#include <atomic>
#include <optional>
#include <string>

#include "base/clock.h"
#include "base/constants.h"
#include "base/errors.h"
#include "base/gil.h"
#include "base/kernel_slots.h"
#include "base/lock.h"
#include "base/no_destructor.h"
#include "base/thread_state.h"
#include "base/wait.h"
#include "cells/adoption.h"
#include "cells/cell.h"
#include "concurrency/admission.h"
#include "dispatch/launch.h"
#include "dispatch/launch_recording.h"
#include "dispatch/the_session.h"
#include "ops/op_info.h"
#include "pools/small_blocks.h"

namespace memmgr::pager {

namespace {

// A function in C of torch's that compiled graphs call without an op. Another takes its place. Guarded by the GIL.
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

// None of these objects is made by a call: a fork in another thread would leave the lock of that taken in the child.
Replaced allocates_buffer;  // allocates a buffer on the budget's device
Replaced checks_alignment;  // copies an input whose address is not aligned as the graph's kernels need it
std::atomic<uint64_t> calls_of_graphs{0};
// The launch that stands for the copy of an input.
NoDestructor<std::optional<LaunchedKernel>> copies_input;

// Allocates a buffer. Waits for other threads whose buffers or ops take the room.
PyObject* allocate_or_wait(PyObject* self, PyObject* args) {
  for (int pauses = 0;; ++pauses) {
    const bool others = others_have_newborns() || others_are_running(false);
    PyObject* made = allocates_buffer.original(self, args);
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
    return allocates_buffer.original(self, args);
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
  {
    std::optional<InKernel> inside;
    if (C10_LIKELY(the_session.open.load(std::memory_order_relaxed))) inside.emplace();
    const c10::TensorImpl* t =
        inside && THPVariable_Check(input) ? THPVariable_Unpack(input).unsafeGetTensorImpl() : nullptr;
    const Cell* c = t && t->has_storage() ? cell_of(t->unsafe_storage().unsafeGetStorageImpl()) : nullptr;
    if (C10_LIKELY(c && the_session.open.load(std::memory_order_acquire) && is_aligned(t, c))) return Py_NewRef(input);
  }
  return launch(**copies_input, input, [&](const Frame*) { return checks_alignment.original(self, input); });
}

}  // namespace

bool page_buffers(PyObject* function) { return allocates_buffer.replace(function, METH_VARARGS, &allocate); }

bool page_alignment_check(PyObject* function) {
  if (!*copies_input)
    copies_input->emplace(LaunchedKernel{info_of_kernel("copy_if_misaligned", "inductor::copy_if_misaligned"),
                                         std::string(1, kArgumentRead)});
  return checks_alignment.replace(function, METH_O, &check_alignment);
}

void unpage_graph_functions() {
  allocates_buffer.put_back();
  checks_alignment.put_back();
}

PyObject* call_graph(PyObject* function, PyObject* args, PyObject* kwargs, bool forward) {
  struct Inside {
    const uint64_t graph = tl_compiled_graph, forward = tl_compiled_forward;
    ~Inside() {
      tl_compiled_graph = graph;
      tl_compiled_forward = forward;
    }
  } const before;
  tl_compiled_graph = ++calls_of_graphs;
  if (forward) tl_compiled_forward = tl_compiled_graph;
  return PyObject_Call(function, args, kwargs);
}

}  // namespace memmgr::pager
