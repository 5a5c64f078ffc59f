#include "guards/ddp_reducer.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <thread>

#if __has_include(<torch/csrc/distributed/c10d/reducer.hpp>)
#include <torch/csrc/distributed/c10d/reducer.hpp>
#define MEMMGR_HAS_REDUCER
#endif

#include "base/clock.h"
#include "base/lock.h"
#include "base/no_destructor.h"
#include "cells/cell.h"
#include "cells/lifetime.h"
#include "cells/types.h"
#include "residency/restore.h"

namespace memmgr::pager {

std::atomic<int> reducers_listening{0};

#ifdef MEMMGR_HAS_REDUCER
namespace {

// Gives access to the reducer's protected members.
struct Open : c10d::Reducer {
  static const auto& buckets(const c10d::Reducer& r) { return r.*(&Open::buckets_); }
  static const auto& parameters(const c10d::Reducer& r) { return r.*(&Open::params_); }
  static bool waits(const c10d::Reducer& r) { return r.*(&Open::expect_autograd_hooks_); }
  static bool moves_gradients(const c10d::Reducer& r) {
    if (!(r.*(&Open::gradient_as_bucket_view_)) || !r.should_rebuild_buckets() || (r.*(&Open::rebuilt_params_)).empty())
      return false;
    const auto has_one = [](const at::Tensor& p) { return p.grad().defined(); };
    return std::any_of(parameters(r).begin(), parameters(r).end(), has_one);
  }
  static bool finds_unused(const c10d::Reducer& r) { return r.*(&Open::find_unused_parameters_); }
};

const c10d::Reducer* reducer_of(PyObject* object) {
  const auto* instance = reinterpret_cast<pybind11::detail::instance*>(object);
  return instance->simple_layout ? static_cast<const c10d::Reducer*>(instance->simple_value_holder[0]) : nullptr;
}

}  // namespace

bool moves_gradients(PyObject* object) {
  const c10d::Reducer* reducer = reducer_of(object);
  return reducer && Open::moves_gradients(*reducer);
}

std::vector<StoragePtr> storages_of_reducer(PyObject* object, bool gradients) {
  std::vector<StoragePtr> found;
  if (!reducer_of(object)) return found;
  const c10d::Reducer& reducer = *reducer_of(object);
  if (!gradients && !Open::waits(reducer)) return found;
  const auto add = [&](const at::Tensor& t) {
    if (t.defined() && t.unsafeGetTensorImpl()->has_storage())
      found.push_back(StoragePtr::reclaim_copy(t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()));
  };
  for (const auto& bucket : Open::buckets(reducer)) add(bucket.gradients);
  // The reducer reads gradients of earlier backwards where this one does not reach their parameters.
  if (gradients || Open::finds_unused(reducer))
    for (const at::Tensor& p : Open::parameters(reducer)) add(p.grad());
  return found;
}
#else
bool moves_gradients(PyObject*) { return false; }
std::vector<StoragePtr> storages_of_reducer(PyObject*, bool) { return {}; }
#endif

namespace {

struct Last {
  std::thread::id thread;
  const void* node;
  std::vector<Cell*> pinned;
};

struct Accumulated {
  Lock& lock = lock_of(LockId::kAccumulated);
  std::vector<Last> all GUARDED_BY(lock);  // one for each thread
};

NoDestructor<Accumulated> accumulated;

// Returns the cells that `node` has touched in this thread. The cells of another node move to `before`, whose pins the
// caller ends outside of the lock.
std::vector<Cell*>& touched_locked(const void* node, std::vector<Cell*>* before) REQUIRES(accumulated->lock) {
  for (Last& last : accumulated->all)
    if (last.thread == std::this_thread::get_id()) {
      if (last.node != node) before->swap(last.pinned);
      last.node = node;
      return last.pinned;
    }
  accumulated->all.push_back({std::this_thread::get_id(), node, {}});
  return accumulated->all.back().pinned;
}

void give_back(const std::vector<Cell*>& cells) {
  if (cells.empty()) return;
  {
    const Hold lock(graph_lock());
    for (Cell* c : cells) end_long_pin_locked(c);
  }
  for (Cell* c : cells) unpin(c);
}

template <class Each>
void keep(Each&& each) {
  const auto node = torch::autograd::get_current_node();
  if (!node || !dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get())) return;
  std::vector<Cell*> before;
  {
    const Hold lock(accumulated->lock);
    const Hold graph(graph_lock());
    std::vector<Cell*>& pinned = touched_locked(node.get(), &before);
    each([&](Cell* c) REQUIRES(graph_lock()) {
      pin(c, ticks());
      begin_long_pin_locked(c);
      pinned.push_back(c);
    });
  }
  give_back(before);
}

}  // namespace

void reducers_listen(bool begin) {
  reducers_listening += begin ? 1 : -1;
  if (reducers_listening.load() > 0) return;
  std::vector<Last> all;
  {
    const Hold lock(accumulated->lock);
    all.swap(accumulated->all);
  }
  for (const Last& last : all) give_back(last.pinned);
}

void keep_accumulated(const Frame& frame) {
  keep([&](auto&& take) REQUIRES(graph_lock()) {
    for (const Touched& t : frame.cells()) take(t.cell);
  });
}

void keep_accumulated(const c10::IValue& view) {
  c10::TensorImpl* t = view.isTensor() ? view.unsafeToTensorImpl() : nullptr;
  Cell* c = t && t->has_storage() ? cell_of(t->unsafe_storage().unsafeGetStorageImpl()) : nullptr;
  if (!c || c->small) return;
  keep([&](auto&& take) REQUIRES(graph_lock()) { take(c); });
  restore_cell(c);
}

}  // namespace memmgr::pager
