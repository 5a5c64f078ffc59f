#include "dispatch/op_run.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <optional>

#include "base/budget.h"
#include "base/clock.h"
#include "base/lock.h"
#include "base/refusal.h"
#include "base/seen_threads.h"
#include "base/share.h"
#include "base/thread_state.h"
#include "base/wait.h"
#include "cells/adoption.h"
#include "cells/mapped_range.h"
#include "guards/extension_ops.h"
#include "ops/list_ops.h"
#include "pools/capturing.h"
#include "pools/pool.h"
#include "pools/scratch.h"
#include "pools/small_blocks.h"
#include "pools/stream_rules.h"
#include "residency/floor.h"

namespace memmgr::pager {

void call_below(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard guard(kKey);
  OneDnnStaysOn onednn;
  op.redispatchBoxed(below, stack);
  onednn.returned();
}

void collect_outputs(const torch::jit::Stack& stack, size_t n, c10::SmallVector<c10::StorageImpl*, 4>* storages) {
  const auto add = [&](const c10::IValue& v) {
    c10::TensorImpl* t = v.isTensor() ? v.unsafeToTensorImpl() : nullptr;
    storages->push_back(t && t->has_storage() ? t->unsafe_storage().unsafeGetStorageImpl() : nullptr);
  };
  for (size_t i = stack.size() - n; i < stack.size(); ++i) {
    if (stack[i].isList())
      for (const c10::IValue& item : stack[i].toListRef()) add(item);
    else
      add(stack[i]);
  }
}

OldStorages::OldStorages(const OpInfo* info, const c10::IValue* args, size_t n) {
  // Foreign code may return a storage from before the call that is no argument.
  known_ = least_born_bytes.load(std::memory_order_relaxed) < budget.options.small_bytes &&
           (info->kind == OpClass::kOrdinary || info->kind == OpClass::kMetadata);
  if (C10_LIKELY(!known_)) return;
  const auto add = [&](const c10::StorageImpl* s) { all_.push_back(s); };
  for (size_t i = 0; i < n; ++i) each_tensor(args[i], [&](c10::TensorImpl* t) { each_storage(t, add); }, add);
}

bool OldStorages::is_new(const c10::StorageImpl* s) const {
  return known_ && std::find(all_.begin(), all_.end(), s) == all_.end();
}

bool newly_large(const c10::StorageImpl* s, const OldStorages& old) {
  // A mapped storage was an argument that found no room.
  if (!s || cell_of(s) || s->sym_nbytes().is_heap_allocated() || !adoptable(s) || is_mapped(s)) return false;
  return s->nbytes() >= budget.options.small_bytes ||
         (s->nbytes() >= least_born_bytes.load(std::memory_order_relaxed) && old.is_new(s));
}

bool may_make_large(const OpInfo* info, const c10::IValue* args, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    if (args[i].isTensor()) {
      if (info->kind != OpClass::kMetadata) return false;
      const c10::TensorImpl* t = args[i].unsafeToTensorImpl();
      // A compiler calls with symbolic sizes, for which no memory is allocated.
      return t->has_storage() && !t->has_symbolic_sizes_strides() &&
             static_cast<uint64_t>(t->numel()) * 16 >= least_born_bytes.load(std::memory_order_relaxed);
    }
    if (args[i].isList() && !args[i].isIntList()) return false;
    if (args[i].isIntList()) {
      uint64_t elements = 1;
      for (const int64_t size : args[i].toIntVector()) elements *= static_cast<uint64_t>(size);
      return elements * 16 >= least_born_bytes.load(std::memory_order_relaxed);
    }
  }
  return false;
}

bool records(const OpInfo* info) { return info->recordable && (c10::GradMode::is_enabled() || info->fills); }

void Call::run(Frame& frame, bool outermost, KeptArguments* kept) {
  kept_ = outermost ? kept : nullptr;
  const size_t n = info_->arguments;
  const c10::IValue* args = stack_->data() + stack_->size() - n;
  frame.pin_all();
  // The touched cells are pinned until the op has ended, so no thread's reclaim evicts them.
  if (records(info_) && !tl_foreign && !budget.forked && !captures.load() &&
      (frame.bytes() > 0 || may_make_large(info_, args, n)))
    record(frame, args, n);
  if (frame.writes()) {
    frame.begin_writes();
    began_writes = true;
  }
  began_writes |= frame.declares_writes() || (info_->kind == OpClass::kForeign && !info_->only_reads);
  const uint64_t& waited = waited_ns();
  const uint64_t stalled = waited;
  const bool cut = C10_UNLIKELY(info_->list_op) && outermost;
  const Share at_once = cut ? largest_index(info_, *stack_) : Share{};
  if (C10_UNLIKELY(times_ops.load(std::memory_order_relaxed)) && outermost) timer.begin();
  const uint64_t begun = ticks();
  Taking& here = taking();
  if (outermost) {
    here.begin_scratch();
    here.side = info_->expensive ? MM_SIDE_HIGH : MM_SIDE_LOW;
  }
  if (info_->seeded) drew = true;
  // No thread draws between the record of the generator's state and this op's draw.
  if (info_->seeded && !drawing_.owns_lock() && info_->kind != OpClass::kForeign) drawing_ = begin_drawing();
  if (info_->kind != OpClass::kForeign || info_->collective) {
    if (C10_UNLIKELY(recipe_ && recipe_->kind->clears.load(std::memory_order_relaxed))) {
      const Filling cleared(0);
      call_below(op_, below_, stack_);
    } else {
      call_below(op_, below_, stack_);
    }
  } else {
    std::optional<ForeignScope> scope;
    if (info_->native) scope.emplace();
    op_.redispatchBoxed(below_, stack_);
  }
  if (drawing_.owns_lock()) drawing_.unlock();
  ended_ = ticks();
  timer.end();
  seconds = seconds_of_ticks(ended_ - begun);
  const uint64_t stall = waited - stalled;
  if (stall) seconds = std::max(1e-7, seconds - static_cast<double>(stall) * 1e-9);
  const uint64_t scratch = outermost ? static_cast<uint64_t>(here.scratch_peak) : 0;
  if (outermost && frame.bytes() + scratch > 0) {
    note_scratch(scratch);
    note_working_set(frame.cells().size(), [&](size_t i) { return frame.cells()[i].cell; }, at_once);
  }
  frame.end_newborns();
  outputs(frame);
}

void Call::note_scratch(uint64_t bytes) {
  const uint64_t known = info_->scratch_bytes.load(std::memory_order_relaxed);
  info_->scratch_bytes.store(std::max(bytes, known - known / 4), std::memory_order_relaxed);
}

bool Call::measures() { return mm_arena_budget(budget.arena) >= MM_UNLIMITED && !budget.options.torture; }

bool Call::has_room(uint64_t bytes) {
  return mm_arena_resident(budget.arena) + bytes <=
         (measures() ? most_resident.load(std::memory_order_relaxed) : mm_arena_budget(budget.arena));
}

bool Call::may_try(const Kind* kind, uint64_t bytes) {
  constexpr uint32_t kMostInVain = 8;  // determinism checks for which cells had to be evicted
  return has_room(bytes) || (!measures() && kind->trials.load(std::memory_order_relaxed) < kMostInVain);
}

bool Call::may_try_in_place() const {
  if (!kept_ || !kept_->there || measures() || info_->writes || info_->seeded || !budget.pool->on_host()) return false;
  if (recipe_->kind->only_beside.load(std::memory_order_relaxed)) return false;
  for (const Cell* c : made)
    if (c->outside) return false;
  return true;
}

namespace {

// Returns true if a kernel written in Python was interrupted (Ctrl-C), which is no result of a check.
bool interrupts(const std::exception& e) {
  const auto* error = dynamic_cast<const pybind11::error_already_set*>(&e);
  if (!error) return false;
  const pybind11::gil_scoped_acquire gil;
  return !error->matches(PyExc_Exception);
}

}  // namespace

Again Call::run_again_in_place(c10::ArrayRef<c10::StorageImpl*> left, c10::ArrayRef<c10::StorageImpl*> all) {
  try {
    return pager::run_again_in_place(*recipe_, left, all);
  } catch (const std::exception& e) {
    // The op's results are lost. Their cells end while they are pinned, so no thread finds them without bytes.
    stack_->resize(stack_->size() - info_->returns);
    if (interrupts(e)) throw;
    recipe_->kind->only_beside.store(true);  // the op runs once more, and its signature is not checked in place again
    if (dynamic_cast<const c10::OutOfMemoryError*>(&e)) throw;
    end_trial(recipe_->kind, false);
    TORCH_CHECK_WITH(OutOfMemoryError, false, "memmgr: a second run failed: ", e.what());
  }
}

void Call::record(Frame& frame, const c10::IValue* args, size_t n) {
  if (info_->seeded) drawing_ = begin_drawing();
  recipe_ = describe(info_, below_, args, n);
  if (drawing_.owns_lock() && !(recipe_ && recipe_->rng.defined())) drawing_.unlock();
  if (!recipe_) return;
  recipe_->filled = info_->fills && !c10::GradMode::is_enabled();
  if (C10_LIKELY(recipe_->kind->trust.load(std::memory_order_relaxed) != Trust::kNew)) return;
  if (kept_) kept_->keep(args, n);  // the determinism check may lose the op's outputs
  if (info_->writes == 0) return;
  // At the first use of a signature that writes in place, the bytes before the write are copied for the second run.
  for (const TensorArg& a : recipe_->tensors)
    if (a.role == Role::kWritten && a.version->cell) {
      Cell* c = a.version->cell;
      if (!may_try(recipe_->kind, c->nbytes)) return;
      try {
        const OwnWork own;
        before_ =
            c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(c->nbytes),
                                                  c->pool->allocate(c->nbytes), c->pool->allocator(), false);
      } catch (const c10::OutOfMemoryError&) {
        return;  // no room for a check: another time
      }
      c->pool->copy(pointer_of(before_.get()).get(), c->bytes.get(), c->nbytes);
    }
}

void Call::outputs(Frame& frame) {
  c10::SmallVector<c10::StorageImpl*, 4> storages;
  const size_t returns = info_->returns;
  if (info_->collective) keep_until_done(frame, returns);
  if (info_->writes && recipe_ && !wrote_all()) give_up();
  if (info_->writes && recipe_) attach_write(frame);
  collect_outputs(*stack_, returns, &storages);
  c10::SmallVector<Version*, 4> versions(storages.size(), nullptr);
  bool any = false;
  {
    Trash trash;
    Hold lock(graph_lock(), std::defer_lock);
    Maker maker;
    for (size_t i = 0; i < storages.size(); ++i) {
      if (!newly_large(storages[i], old_)) continue;
      if (!lock.owns_lock()) {
        maker = as_maker(info_);
        lock.lock();
      }
      Cell* c = adopt_locked(storages[i], 1, ended_, true, maker);
      if (!c) continue;
      frame.take_pin(c);
      made.push_back(c);
      versions[i] = c->version;
      any = true;
      if (info_->uninitialized) begin_newborn_locked(c);
    }
    if (C10_LIKELY(any && recipe_ && is_trusted())) {  // under one lock: most recorded ops end here
      note_run();
      attach_locked(std::move(recipe_), versions, &trash);
    }
  }
  if (!recipe_) {
    keep_recipes_few();
    return;
  }
  if (!any) {
    give_up();
    return;
  }
  note_run();
  const c10::SmallVector<c10::StorageImpl*, 4> all(storages);
  for (size_t i = 0; i < storages.size(); ++i)
    if (!versions[i]) storages[i] = nullptr;
  try_kind(storages, all);
  attach_if_trusted(versions);
}

void Call::attach_if_trusted(c10::ArrayRef<Version*> versions) {
  if (!is_trusted()) {
    if (measures() && recipe_->kind->trust.load() == Trust::kNew) {
      const Hold lock(graph_lock());
      for (Version* v : versions) {
        if (!v || v->recipe) continue;
        v->presumed = true;
        if (v->cell && v->cell->version == v) count_root_locked(v->cell);
      }
    }
    give_up();
    return;
  }
  {
    Trash trash;
    const Hold lock(graph_lock());
    attach_locked(std::move(recipe_), versions, &trash);
  }
  keep_recipes_few();
}

bool Call::wrote_all() const {
  for (const TensorArg& a : recipe_->tensors) {
    if (a.role != Role::kFresh) continue;
    const c10::IValue& result = (*stack_)[stack_->size() - info_->returns];
    const c10::TensorImpl* t = result.isTensor() ? result.unsafeToTensorImpl() : nullptr;
    if (!t || static_cast<uint64_t>(t->numel()) * t->itemsize() != a.storage_bytes) return false;
  }
  return true;
}

void Call::attach_write(const Frame& frame) {
  Cell* written = nullptr;
  for (const Touched& t : frame.cells())
    if (t.written) written = t.cell;
  if (!written || !(written->state.load() & kPinMask) || (written->state.load() & kDead)) {
    give_up();
    return;
  }
  c10::StorageImpl* s = nullptr;
  {
    const Hold lock(graph_lock());
    s = static_cast<c10::StorageImpl*>(written->storage._unsafe_get_target());
  }
  if (!s || cell_of(s) != written) {
    give_up();
    return;
  }
  note_run();
  try_kind(s, {});
  attach_if_trusted(written->version);
}

void Call::note_run() {
  if (C10_UNLIKELY(recipe_->kind->trust.load(std::memory_order_relaxed) == Trust::kFamily))
    recipe_->seconds = queues ? seconds_by_family(*recipe_) : seconds;
  else if (C10_LIKELY(!queues))
    note_seconds(recipe_->kind, seconds);
  else
    seconds = std::max(seconds, recipe_->kind->seconds.load(std::memory_order_relaxed));
}

void Call::try_kind(c10::ArrayRef<c10::StorageImpl*> left, c10::ArrayRef<c10::StorageImpl*> all) {
  Kind* kind = recipe_->kind;
  if (kind->trust.load(std::memory_order_relaxed) != Trust::kNew) return;
  for (const TensorArg& a : recipe_->tensors)
    if (a.role == Role::kWritten && !before_) return;
  const bool in_place = !has_room(scratch_peak()) && may_try_in_place();
  if (!in_place && !may_try(kind, scratch_peak())) return;
  try {
    const Again again = in_place ? run_again_in_place(left, all) : run_again(*recipe_, left, std::move(before_));
    const bool same = again != Again::kOther;
    if (again == Again::kSameWhereWritten) kind->clears.store(true);
    if (same && left.size() == 1 && left[0] && budget.pool->on_host()) {
      mm_bits bits{};
      kind->bits_bytes = mm_bits_pack(pointer_of(left[0]).get(), left[0]->nbytes(), &bits);
      if (kind->bits_bytes) mm_bits_free(&bits);
    }
    end_trial(kind, same);
  } catch (const c10::OutOfMemoryError&) {
    if (in_place) throw;
    kind->trials++;  // no room for a second result: another time
    kind->needs_bytes = refused_bytes() + scratch_peak();
  } catch (const std::exception& e) {
    if (interrupts(e)) throw;
    end_trial(kind, false);
  }
}

void Call::keep_until_done(Frame& frame, size_t returns) {
  for (size_t i = stack_->size() - returns; i < stack_->size(); ++i) {
    if (!(*stack_)[i].isCustomClass() && !(*stack_)[i].isObject()) continue;
    c10::intrusive_ptr<c10::intrusive_ptr_target> work;
    const auto object = (*stack_)[i].toObject();
    if (object->slots().empty() || !object->getSlot(0).isCapsule()) continue;
    work = object->getSlot(0).toCapsule();
    pager::keep_until_done(work, frame.hand_over());
    return;
  }
}

}  // namespace memmgr::pager
