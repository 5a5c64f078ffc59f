#include "dispatch/op_run.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <optional>

#include "base/clock.h"
#include "base/forked_child.h"
#include "base/lock.h"
#include "base/refusal.h"
#include "base/seen_threads.h"
#include "base/share.h"
#include "base/thread_state.h"
#include "base/wait.h"
#include "cells/adoption.h"
#include "cells/mapped_range.h"
#include "dispatch/the_session.h"
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
  known_ = least_born_bytes.load(std::memory_order_relaxed) < the_session.options.small_bytes &&
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
  if (!s || cell_of(s) || s->sym_nbytes().is_heap_allocated() || !adoptable(the_session, s) || is_mapped(s))
    return false;
  return s->nbytes() >= the_session.options.small_bytes ||
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

bool records(const OpInfo* info) { return info->recordable && (makes_recipes() || info->fills); }

void Call::run(Frame& frame, bool outermost, KeptArguments* kept) {
  kept_ = outermost ? kept : nullptr;
  const size_t n = info_->arguments;
  const c10::IValue* args = stack_->data() + stack_->size() - n;
  frame.pin_all();
  // The touched cells are pinned until the op has ended, so no thread's reclaim evicts them.
  if (records(info_) && !tl_foreign && !forked_child && !captures.load() &&
      (frame.bytes() > 0 || may_make_large(info_, args, n)))
    record(args, n);
  if (frame.writes()) {
    frame.begin_writes();
    began_writes = true;
  }
  began_writes |= frame.declares_writes() || (info_->kind == OpClass::kForeign && !info_->only_reads);
  const uint64_t& waited = waited_ns();
  const uint64_t stalled = waited;
  const bool cut = C10_UNLIKELY(info_->list_op) && outermost;
  const Share at_once = cut ? largest_index(the_session, info_, *stack_) : Share{};
  if (C10_UNLIKELY(times_ops.load(std::memory_order_relaxed)) && outermost) timer.begin(*the_session.pool, info_);
  const uint64_t begun = ticks();
  Taking& here = taking();
  if (outermost) here.begin_scratch();
  if (info_->seeded) drew = true;
  // No thread draws between the record of the generator's state and this op's draw.
  if (info_->seeded && !drawing_.owns_lock() && info_->kind != OpClass::kForeign) drawing_ = begin_drawing();
  if (info_->kind != OpClass::kForeign || info_->collective) {
    if (C10_UNLIKELY(recording_.recipe() && recording_.recipe()->kind->clears.load(std::memory_order_relaxed))) {
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
    note_working_set(the_session, frame.cells().size(), [&](size_t i) { return frame.cells()[i].cell; }, at_once);
  }
  frame.end_newborns();
  outputs(frame);
}

void Call::note_scratch(uint64_t bytes) {
  const uint64_t known = info_->scratch_bytes.load(std::memory_order_relaxed);
  info_->scratch_bytes.store(std::max(bytes, known - known / 4), std::memory_order_relaxed);
}

bool Call::may_try_in_place() const {
  if (!kept_ || !kept_->there || is_measuring_run() || info_->writes || info_->seeded || !the_session.pool->on_host())
    return false;
  if (recording_.recipe()->kind->only_beside.load(std::memory_order_relaxed)) return false;
  for (const Cell* c : made)
    if (c->outside) return false;
  return true;
}

Again Call::run_again_in_place(c10::ArrayRef<c10::StorageImpl*> left, c10::ArrayRef<c10::StorageImpl*> all) {
  try {
    return pager::run_again_in_place(the_session, *recording_.recipe(), left, all);
  } catch (const std::exception& e) {
    // The op's results are lost. Their cells end while they are pinned, so no thread finds them without bytes.
    stack_->resize(stack_->size() - info_->returns);
    if (interrupts(e)) throw;
    recording_.recipe()->kind->only_beside.store(
        true);  // the op runs once more, and its signature is not checked in place again
    if (dynamic_cast<const c10::OutOfMemoryError*>(&e)) throw;
    end_trial(the_session, recording_.recipe()->kind, false);
    TORCH_CHECK_WITH(OutOfMemoryError, false, "memmgr: a second run failed: ", e.what());
  }
}

void Call::record(const c10::IValue* args, size_t n) {
  if (info_->seeded) drawing_ = begin_drawing();
  recording_.begin(describe(the_session, info_, below_, args, n));
  Recipe* const recipe = recording_.recipe();
  if (drawing_.owns_lock() && !(recipe && recipe->rng.defined())) drawing_.unlock();
  if (!recipe) return;
  recipe->filled = info_->fills && !makes_recipes();
  if (C10_LIKELY(!recording_.is_new())) return;
  if (kept_) kept_->keep(args, n);  // the determinism check may lose the op's outputs
  if (info_->writes > 0) recording_.copy_written();
}

void Call::outputs(Frame& frame) {
  c10::SmallVector<c10::StorageImpl*, 4> storages;
  const size_t returns = info_->returns;
  if (info_->collective) keep_until_done(frame, returns);
  if (info_->writes && recording_.recipe() && !wrote_all()) give_up();
  if (info_->writes && recording_.recipe()) attach_write(frame);
  collect_outputs(*stack_, returns, &storages);
  c10::SmallVector<Version*, 4> versions(storages.size(), nullptr);
  bool any = false;
  const auto large_from = [&](size_t i) {
    while (i < storages.size() && !newly_large(storages[i], old_)) ++i;
    return i;
  };
  if (size_t i = large_from(0); i < storages.size()) {
    Trash trash;
    const Maker maker = as_maker(info_);
    const Hold lock(graph_lock());
    for (; i < storages.size(); i = large_from(i + 1)) {
      Cell* c = adopt_locked(the_session, storages[i], 1, ended_, true, maker);
      if (!c) continue;
      frame.take_pin(c);
      made.push_back(c);
      if (storages.size() == 1)
        for (const Touched& t : frame.cells()) note_growth_locked(c, t.cell);
      versions[i] = c->version;
      any = true;
      if (info_->uninitialized) begin_newborn_locked(c);
    }
    if (C10_LIKELY(any && recording_.recipe() &&
                   recording_.recipe()->kind->trusted())) {  // under one lock: most recorded ops end here
      note_run();
      attach_locked(recording_.take(), versions, &trash);
    }
  }
  if (!recording_.recipe()) {
    keep_recipes_few(the_session);
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
  recording_.attach_if_trusted(versions);
}

bool Call::wrote_all() const {
  for (const TensorArg& a : recording_.recipe()->tensors) {
    if (a.role != ArgumentRole::kFresh) continue;
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
  recording_.attach_if_trusted(*written);
}

void Call::note_run() {
  recording_.note_run(seconds);
  if (queues) seconds = std::max(seconds, recording_.recipe()->kind->seconds.load(std::memory_order_relaxed));
}

void Call::try_kind(c10::ArrayRef<c10::StorageImpl*> left, c10::ArrayRef<c10::StorageImpl*> all) {
  if (!recording_.is_new() || has_room_for_check(scratch_peak()) || !may_try_in_place())
    return recording_.check(left, scratch_peak());
  Kind* kind = recording_.recipe()->kind;
  const Again again = run_again_in_place(left, all);
  if (again == Again::kSameWhereWritten) kind->clears.store(true);
  recording_.end_check(again != Again::kOther, left);
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
