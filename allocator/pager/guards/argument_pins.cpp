#include "guards/argument_pins.h"

#include <unordered_set>
#include <utility>

#include "base/clock.h"
#include "base/errors.h"
#include "base/lock.h"
#include "base/refusal.h"
#include "base/session.h"
#include "base/thread_state.h"
#include "cells/adoption.h"
#include "cells/cell.h"
#include "cells/lifetime.h"
#include "cells/pointer_trap.h"
#include "cells/types.h"
#include "cells/version.h"
#include "concurrency/deferred_steps.h"
#include "guards/mapped_files.h"
#include "guards/room.h"
#include "guards/stream_guard.h"
#include "pools/scratch.h"
#include "pools/stream_rules.h"
#include "residency/floor.h"
#include "residency/restore.h"

namespace memmgr::pager {

namespace {

struct PinObject {
  PyObject_HEAD Session* session;
  std::vector<std::pair<Cell*, StoragePtr>>* cells;
  PinLife life;
  bool counted;  // it pins its cells: a pin that failed has nothing to end
};

void pin_dealloc(PyObject* self) {
  const PinObject& pin = *reinterpret_cast<PinObject*>(self);
  auto* const pins = pin.cells;
  if (pin.counted && pin.life == PinLife::kRegion) {
    --tl_regions;
    const Session& session = *pin.session;
    if (session.open) note_working_set(session, pins->size(), [&](size_t i) { return (*pins)[i].first; });
  }
  if (pin.counted && pin.life != PinLife::kHeld) --tl_readers;
  if (pin.counted && pin.life == PinLife::kHeld) {
    const Hold lock(graph_lock());
    for (auto& [c, s] : *pins) end_long_pin_locked(c);
  }
  for (auto& [c, s] : *pins) {
    watch_writes(c);
    unpin(c);
  }
  delete pins;
  Py_TYPE(self)->tp_free(self);
}

PyTypeObject pin_type = [] {
  PyTypeObject t{PyVarObject_HEAD_INIT(nullptr, 0)};
  t.tp_name = "memmgr._pager.Pin";
  t.tp_basicsize = sizeof(PinObject);
  t.tp_flags = Py_TPFLAGS_DEFAULT;
  t.tp_dealloc = pin_dealloc;
  t.tp_doc = "Keeps the bytes of storages in memory, where they are, while it lives (rule 9: scoped).";
  return t;
}();

}  // namespace

PyObject* new_pin(Session& session, std::vector<StoragePtr> storages, PinLife life, bool written, bool one_element) {
  auto* self = PyObject_New(PinObject, &pin_type);
  if (!self) return nullptr;
  self->session = &session;
  self->cells = new std::vector<std::pair<Cell*, StoragePtr>>;
  self->life = life;
  self->counted = false;
  PyObject* result = guarded([&]() -> PyObject* {
    if (queues && session.open) note_stream(session);  // the reader may queue no op
    for (const StoragePtr& s : storages) finish_pending_of(session, s.get());
    PyThreadState* saved = PyEval_SaveThread();
    size_t next = 0;
    try {
      for (StoragePtr& s : storages) {
        ++next;
        Cell* c = cell_of(s.get());
        if (!c && session.open && written) grows_in_pool(session, s.get());
        if (!c && session.open && adoptable(session, s.get())) {
          if (written || s->nbytes() >= session.options.small_bytes)
            c = one_element ? adopt_if_room(session, s.get(), tl_depth == 0)
                            : adopt_in_budget(session, s.get(), tl_depth == 0);
          else
            share_mapping(s.get());
        }
        if (!c) continue;
        pin(c, ticks());
        self->cells->emplace_back(c, std::move(s));
        restore_cell(c);
        if (written) begin_new_version(c);
      }
    } catch (const c10::OutOfMemoryError&) {  // the other storages have to be in memory at the same time
      std::unordered_set<const c10::StorageImpl*> others;
      for (size_t i = next; i < storages.size(); ++i)
        if (const Cell* c = cell_of(storages[i].get()); c && others.insert(storages[i].get()).second)
          if (c->state.load() & kAbsent) refuse_beside(c->nbytes);
      PyEval_RestoreThread(saved);
      throw;
    } catch (...) {
      PyEval_RestoreThread(saved);
      throw;
    }
    PyEval_RestoreThread(saved);
    self->counted = true;
    if (life == PinLife::kRegion) {
      ++tl_regions;
      begin_scratch();
    }
    if (life != PinLife::kHeld) {
      ++tl_readers;
    } else {
      const Hold lock(graph_lock());
      for (auto& [c, s] : *self->cells) begin_long_pin_locked(c);
    }
    return reinterpret_cast<PyObject*>(self);
  });
  if (!result) Py_DECREF(self);
  return result;
}

PyTypeObject* pin_class() { return PyType_Ready(&pin_type) == 0 ? &pin_type : nullptr; }

}  // namespace memmgr::pager
