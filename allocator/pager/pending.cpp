#include "pending.h"

#include <ATen/ThreadLocalState.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <thread>
#include <unordered_map>

#include "budget.h"
#include "fork.h"
#include "frame.h"
#include "numerics.h"
#include "pools/pool.h"
#include "reclaim.h"

namespace memmgr::pager {

std::atomic<int> pending_slices{0};

namespace {

struct Slice {
  PyObject* run;                                              // counted
  std::vector<c10::StorageImpl*> storages;                    // all, once
  std::vector<std::pair<c10::StorageImpl*, size_t>> written;  // with the references that the slice has
  at::ThreadLocalState state;  // grad mode, autocast, functorch, modes: as the step had them
  int numerics = numerics_now();
  std::thread::id runner{};  // set: it is under way
};
using SlicePtr = std::shared_ptr<Slice>;

struct Pending {
  std::mutex& lock = taken_by_forks(new std::mutex);
  std::condition_variable ended;
  std::unordered_map<c10::StorageImpl*, SlicePtr> of_storage;
};

Pending& pending() {
  static auto* p = new Pending;
  return *p;
}

void end(const SlicePtr& slice) {
  {
    std::lock_guard<std::mutex> lock(pending().lock);
    for (c10::StorageImpl* s : slice->storages) pending().of_storage.erase(s);
  }
  pending_slices--;
  pending().ended.notify_all();
}

// Once, in whichever thread needs it first. A slice that fails has ended all the same: like a step that fails in its
// middle it has changed some of its tensors, and running it again would change these twice.
void finish(const SlicePtr& slice) {
  {
    std::unique_lock<std::mutex> lock(pending().lock);
    const auto waits = [&] {
      const auto found = pending().of_storage.find(slice->storages.front());
      return found != pending().of_storage.end() && found->second == slice;
    };
    if (!waits() || slice->runner == std::this_thread::get_id()) return;
    if (slice->runner != std::thread::id()) {
      lock.unlock();
      WithoutGil free;
      lock.lock();
      pending().ended.wait(lock, [&] { return !waits(); });
      lock.unlock();  // before the GIL
      return;
    }
    slice->runner = std::this_thread::get_id();
  }
  const PyGILState_STATE gil = PyGILState_Ensure();
  PyObject* result;
  {
    at::ThreadLocalStateGuard as_it_was(slice->state);
    NumericsGuard numerics(slice->numerics);
    result = PyObject_CallNoArgs(slice->run);
  }
  python_error error;
  const bool failed = !result;
  if (failed) error.persist();
  Py_XDECREF(result);
  end(slice);
  Py_CLEAR(slice->run);
  PyGILState_Release(gil);
  if (failed) throw error;
}

void finish_each(const c10::SmallVector<SlicePtr, 4>& slices) {
  for (const SlicePtr& slice : slices) finish(slice);
}

void collect_locked(c10::StorageImpl* s, c10::SmallVector<SlicePtr, 4>* found) {
  const auto it = pending().of_storage.find(s);
  if (it != pending().of_storage.end() && std::find(found->begin(), found->end(), it->second) == found->end())
    found->push_back(it->second);
}

void collect_locked(const c10::IValue& v, c10::SmallVector<SlicePtr, 4>* found) {
  if (v.isTensor()) {
    const c10::TensorImpl* t = v.unsafeToTensorImpl();
    if (t->has_storage()) collect_locked(t->unsafe_storage().unsafeGetStorageImpl(), found);
  } else if (v.isList()) {
    for (const c10::IValue& item : v.toListRef()) collect_locked(item, found);
  } else if (v.isStorage()) {
    collect_locked(v.toStorage().unsafeGetStorageImpl(), found);
  } else if (v.isTuple()) {
    for (const c10::IValue& item : v.toTupleRef().elements()) collect_locked(item, found);
  } else if (v.isGenericDict()) {
    for (const auto& entry : v.toGenericDict()) collect_locked(entry.value(), found);
  }
}

// Its bytes are read by others than ops and readers, who are asked before.
bool is_watched(const c10::StorageImpl* s) {
  std::lock_guard<std::mutex> lock(graph_lock());
  const Cell* c = cell_of(s);
  if (c) return c->escape == Escape::kNone && c->standing_pins == 0;
  const auto deleter = pointer_of(s).get_deleter();
  return deleter == budget.pool->deleter() || deleter == c10::GetDefaultCPUAllocator()->raw_deleter();
}

}  // namespace

bool add_pending(PyObject* run, const SliceStorages& storages) {
  drop_unread_pending();
  auto slice = std::make_shared<Slice>();
  std::unordered_map<c10::StorageImpl*, size_t> written;
  for (const auto* list : {&storages.written, &storages.read})
    for (const StoragePtr& s : *list) {
      if (!s || !is_watched(s.get())) return false;
      if (list == &storages.written) ++written[s.get()];
      slice->storages.push_back(s.get());
    }
  if (written.empty()) return false;
  slice->written.assign(written.begin(), written.end());
  std::sort(slice->storages.begin(), slice->storages.end());
  slice->storages.erase(std::unique(slice->storages.begin(), slice->storages.end()), slice->storages.end());
  c10::SmallVector<SlicePtr, 4> before;
  {
    std::lock_guard<std::mutex> lock(pending().lock);
    for (c10::StorageImpl* s : slice->storages) collect_locked(s, &before);
  }
  finish_each(before);
  Py_INCREF(run);
  slice->run = run;
  counters.pending_slices++;
  pending_slices++;
  std::lock_guard<std::mutex> lock(pending().lock);
  for (c10::StorageImpl* s : slice->storages) pending().of_storage.emplace(s, slice);
  return true;
}

void finish_pending_of(const c10::IValue& value) {
  if (C10_LIKELY(pending_slices.load(std::memory_order_relaxed) == 0)) return;
  c10::SmallVector<SlicePtr, 4> found;
  {
    std::lock_guard<std::mutex> lock(pending().lock);
    collect_locked(value, &found);
  }
  finish_each(found);
}

void finish_pending_of(c10::StorageImpl* s) {
  if (C10_LIKELY(pending_slices.load(std::memory_order_relaxed) == 0)) return;
  c10::SmallVector<SlicePtr, 4> found;
  {
    std::lock_guard<std::mutex> lock(pending().lock);
    collect_locked(s, &found);
  }
  finish_each(found);
}

void drop_unread_pending() {
  if (C10_LIKELY(pending_slices.load(std::memory_order_relaxed) == 0)) return;
  c10::SmallVector<SlicePtr, 4> unread;
  {
    std::lock_guard<std::mutex> lock(pending().lock);
    for (const auto& [storage, slice] : pending().of_storage) {
      if (slice->runner != std::thread::id() || slice->storages.front() != storage) continue;
      const auto ours = [](const auto& w) { return c10::raw::intrusive_ptr::use_count(w.first) == w.second; };
      if (std::all_of(slice->written.begin(), slice->written.end(), ours)) unread.push_back(slice);
    }
  }
  for (const SlicePtr& slice : unread) {
    end(slice);
    Py_CLEAR(slice->run);
  }
}

void finish_all_pending() {
  while (pending_slices.load() > 0) {
    SlicePtr next;
    {
      std::lock_guard<std::mutex> lock(pending().lock);
      for (const auto& [storage, slice] : pending().of_storage)
        if (slice->runner != std::this_thread::get_id()) next = slice;
    }
    if (!next) return;
    finish(next);
  }
}

}  // namespace memmgr::pager
