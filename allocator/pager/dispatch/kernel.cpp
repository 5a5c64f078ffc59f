#include "dispatch/kernel.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <exception>

#include "base/clock.h"
#include "base/deferred_drop.h"
#include "base/errors.h"
#include "base/forked_child.h"
#include "base/kernel_slots.h"
#include "base/lock.h"
#include "base/seen_threads.h"
#include "base/tensors.h"
#include "base/thread_state.h"
#include "base/wait.h"
#include "cells/adoption.h"
#include "cells/cell.h"
#include "cells/check_graph.h"
#include "cells/lifetime.h"
#include "cells/pointer_trap.h"
#include "cells/stream_order.h"
#include "cells/types.h"
#include "concurrency/admission.h"
#include "concurrency/deferred_steps.h"
#include "dispatch/op_need.h"
#include "dispatch/op_run.h"
#include "dispatch/the_session.h"
#include "guards/collective_pins.h"
#include "guards/ddp_reducer.h"
#include "guards/escape.h"
#include "guards/extension_ops.h"
#include "guards/nested_tensors.h"
#include "guards/stream_guard.h"
#include "ops/list_ops.h"
#include "plan/op_in_timeline.h"
#include "plan/timeline.h"
#include "pools/capturing.h"
#include "pools/pool.h"
#include "pools/scratch.h"
#include "pools/stream_rules.h"
#include "remat/replay.h"
#include "residency/checksums.h"
#include "residency/evict.h"
#include "residency/restore.h"
#include "residency/victims.h"

namespace memmgr::pager {

namespace {

// ---- the op ----

void touch_arguments(Frame& frame, const OpInfo* info, const c10::IValue* args, size_t n) {
  const bool statistics = info->moves_statistics(args);
  for (size_t i = 0; i < n; ++i) {
    if (!info->may_hold_tensors.empty() && !info->may_hold_tensors[i]) continue;
    bool written = info->written.empty() || info->written[i];
    if (statistics && (static_cast<int>(i) == info->running_mean || static_cast<int>(i) == info->running_var))
      written = true;
    frame.value(args[i], written);
  }
}

// Makes cells of the outputs of an op that is not recorded, and newborns of outputs that are not written yet (rule 3).
void adopt_outputs(const OpInfo* info, const torch::jit::Stack& stack, size_t returns, const OldStorages& old,
                   c10::SmallVector<Cell*, 4>* made) {
  c10::SmallVector<c10::StorageImpl*, 4> storages;
  collect_outputs(stack, returns, &storages);
  Maker maker;
  for (c10::StorageImpl* s : storages) {
    if (!newly_large(s, old)) continue;
    if (!maker.op) maker = as_maker(info);
    const Hold lock(graph_lock());
    Cell* c = adopt_locked(the_session, s, 0, ticks(), true, maker);
    if (!c) continue;
    made->push_back(c);
    if (info->uninitialized) begin_newborn_locked(c);
  }
}

// Pins the outputs for foreign code, which may take their addresses next.
void keep_outputs(const torch::jit::Stack& stack, size_t returns) {
  c10::SmallVector<c10::StorageImpl*, 4> storages;
  collect_outputs(stack, returns, &storages);
  for (c10::StorageImpl* s : storages)
    if (Cell* c = s ? cell_of(s) : nullptr) {
      pin(c, ticks());
      tl_foreign->keep(c);
      unpin(c);
    }
}

// The op has read a tensor that is not among its arguments, and has hit the trap. Restores and pins its cell. False:
// the text is not from a trap.
bool bring_back_trapped(const char* what, std::unique_ptr<Frame>* frame) {
  const uint64_t id = trapped_cell(what);
  if (!id) return false;
  Cell* found = nullptr;
  StoragePtr storage;
  {
    const Hold lock(graph_lock());
    for_each_cell_locked([&](Cell* c) {
      if (reinterpret_cast<uintptr_t>(c) == id) found = c;
    });
    if (!found) return false;
    storage = hold(found);
    if (!storage) return false;
    if (!*frame) *frame = std::make_unique<Frame>(the_session);
    (*frame)->add_pinned(found);
  }
  restore_cell(found);
  drop(std::move(storage));
  return true;
}

// An op that gives the program values of the device, a number or a tensor on the CPU, has waited for it.
void compare_before_values_show(const torch::jit::Stack& stack, size_t returns) {
  if (C10_LIKELY(comparisons.load(std::memory_order_relaxed) == 0)) return;
  for (size_t i = stack.size() - std::min(returns, stack.size()); i < stack.size(); ++i)
    if (!stack[i].isTensor() || (stack[i].toTensor().defined() && stack[i].toTensor().is_cpu()))
      return end_comparisons_that_are_there();
}

uint64_t room_for_states() { return mm_arena_budget(the_session.arena) / 4 * 3; }

// Measures the pager's own time in one outermost op of a thread in 64: without the op's, and without waits.
class OwnTime {
 public:
  explicit OwnTime(bool outermost) {
    static thread_local uint32_t ops = 0;
    if (C10_LIKELY(!outermost || ++ops % kEvery != 0)) return;
    waited_ = waited_ns();
    trials_ = the_session.counters.trials.load(std::memory_order_relaxed);
    begun_ = ticks();
  }
  ~OwnTime() {
    if (C10_LIKELY(!begun_) || the_session.counters.trials.load(std::memory_order_relaxed) != trials_) return;
    const double spent =
        seconds_of_ticks(ticks() - begun_) - op_seconds - 1e-9 * static_cast<double>(waited_ns() - waited_);
    const double times = spent < kPreempted ? kEvery : 1;
    if (spent > 0) the_session.counters.own_ns += static_cast<uint64_t>(spent * 1e9 * times);
  }
  OwnTime(const OwnTime&) = delete;
  OwnTime& operator=(const OwnTime&) = delete;

  bool measures() const { return begun_ != 0; }
  double op_seconds = 0;

 private:
  static constexpr uint32_t kEvery = 64;
  static constexpr double kPreempted = 2e-3;  // seconds: the thread did not run, which did not happen to 64 ops
  uint64_t begun_ = 0, waited_ = 0, trials_ = 0;
};

void page(const c10::OperatorHandle& op, OpInfo* info, c10::DispatchKeySet below, torch::jit::Stack* stack,
          Moment* moment) {
  follow_stream();
  Depth depth;
  OwnTime own(depth.outermost());
  std::optional<Admitted> admitted;  // ends after the pins
  Frame frame(the_session);
  frame.may_wait(depth.outermost());
  frame.reads_hardly(info->reads_hardly);
  std::unique_ptr<Frame> extra;  // for tensors that are not among the arguments
  const size_t n = info->arguments, base = stack->size() - n;
  const c10::IValue* args = stack->data() + base;
  if (info->kind != OpClass::kMetadata) touch_arguments(frame, info, args, n);
  if (works_in_flight()) poll_works();
  const OldStorages old(info, args, n);
  KeptArguments kept;
  const auto put_back = [&] {
    stack->resize(base);
    stack->insert(stack->end(), kept.arguments.begin(), kept.arguments.end());
  };
  const bool others_run = others_are_running(!depth.outermost());
  if (C10_LIKELY(frame.empty() && !frame.writes() && info->kind != OpClass::kForeign && !info->seeded) &&
      !(records(info) && may_make_large(info, args, n))) {
    // Only small tensors: the pager has nothing to restore, to change or to record.
    const bool again = others_run && depth.outermost() && !frame.declares_writes();
    if (C10_UNLIKELY(again)) kept.keep(args, n);
    try {
      const size_t returns = info->returns;
      const uint64_t begun = C10_UNLIKELY(own.measures()) ? ticks() : 0;
      call_below(op, below, stack);
      if (C10_UNLIKELY(own.measures())) own.op_seconds = seconds_of_ticks(ticks() - begun);
      c10::SmallVector<Cell*, 4> made;
      adopt_outputs(info, *stack, returns, old, &made);
      compare_before_values_show(*stack, returns);
      if (C10_UNLIKELY(moment && !made.empty())) moment->ended(info, made.data(), made.size(), 0, 0);
      if (C10_UNLIKELY(tl_foreign != nullptr)) keep_outputs(*stack, returns);
      return;
    } catch (const c10::OutOfMemoryError&) {  // the op has made a large output after all
      if (!again) throw;
      put_back();
    }
  }
  if (C10_UNLIKELY(moment && !frame.empty())) moment->begins(info, frame);
  const uint64_t need = frame.bytes() + info->scratch_bytes.load(std::memory_order_relaxed);
  bool alone = false;
  // Another try may be needed: another thread's op runs, cells are absent, or another thread has newborns.
  if (others_run || totals.absent_cells.load(std::memory_order_relaxed) > 0 || others_have_newborns())
    kept.keep(stack->data() + base, n);
  int pauses = 0;
  SeenNewborns newborns;
  for (int attempt = 0;; ++attempt) {
    Call call(op, info, below, stack, old);
    if (kept.there) newborns.look();
    try {
      if (depth.outermost() && !forked_child)
        admitted.emplace(the_session, need, alone, info->kind == OpClass::kForeign);
      call.run(frame, depth.outermost(), &kept);
      own.op_seconds = call.seconds;
      if (C10_UNLIKELY(moment != nullptr))
        moment->ended(info, call.made.data(), call.made.size(), call.seconds, scratch_peak(), &call.timer);
      break;
    } catch (const c10::OutOfMemoryError&) {
      call.give_up();
      const bool last = alone && (++pauses > kMostPauses || !newborns.may_free_room());
      if (last || !kept.there || !depth.outermost() || call.began_writes || call.drew) {
        if (kept.there) put_back();  // the error's text needs the arguments
        throw;
      }
      alone = true;
      the_session.counters.retries++;
    } catch (const c10::Error& e) {
      call.give_up();
      if (!kept.there || attempt >= 16 || call.began_writes || call.drew || !bring_back_trapped(e.what(), &extra))
        throw;
      the_session.counters.trap_retries++;
    } catch (...) {
      call.give_up();
      throw;
    }
    frame.release();
    admitted.reset();
    if (pauses > 0) wait_for_others(kPauseSeconds);  // until other threads have touched their newborns
    put_back();
    if (info->kind != OpClass::kMetadata) touch_arguments(frame, info, stack->data() + base, n);
  }
  if (C10_UNLIKELY(queues)) note_queued(frame.bytes());
  compare_before_values_show(*stack, info->returns);
  if (C10_UNLIKELY(tl_foreign != nullptr)) tl_foreign->keep(frame);
  if (C10_UNLIKELY(reducers_listening.load(std::memory_order_relaxed))) keep_accumulated(frame);
  // An optimizer's new states have no bytes until their first touch, if room is short. Otherwise this gains nothing.
  const bool unborn = info->fills && tl_making_states && mm_arena_resident(the_session.arena) > room_for_states();
  if (C10_UNLIKELY((the_session.options.torture || unborn) && depth.outermost())) {
    extra.reset();
    evict_touched(&frame, the_session.options.torture);
  }
}

// The op of this thread that begins now has its place in the timeline.
bool is_noted() {
  return C10_UNLIKELY(timeline_on.load(std::memory_order_relaxed)) && tl_depth == 0 && tl_running_recipes == 0;
}

void ordinary(const c10::OperatorHandle& op, OpInfo* info, c10::DispatchKeySet below, torch::jit::Stack* stack) {
  if (C10_UNLIKELY(info->list_op) &&
      run_in_slices(the_session, info, stack, [&](torch::jit::Stack* slice) { ordinary(op, info, below, slice); }))
    return;
  if (C10_LIKELY(!is_noted())) {
    page(op, info, below, stack, nullptr);
  } else {
    Moment moment(the_session);
    page(op, info, below, stack, &moment);
    moment.left();
  }
  if (C10_UNLIKELY(checks_graph.load(std::memory_order_relaxed)) && tl_depth == 0 && tl_running_recipes == 0)
    check_graph_after_op();
}

void captured(const c10::OperatorHandle& op, OpInfo* info, c10::DispatchKeySet below, torch::jit::Stack* stack) {
  Depth depth;
  Frame frame(the_session);
  touch_arguments(frame, info, stack->data() + stack->size() - info->arguments, info->arguments);
  keep_captured(&frame);
  const size_t returns = info->returns;
  call_below(op, below, stack);
  c10::SmallVector<Cell*, 4> made;
  adopt_outputs(info, *stack, returns, {}, &made);
  for (Cell* c : made) escape(c, Escape::kCaptured);
}

// Handles record_stream. For an absent cell the call is skipped: streams are recorded when its bytes are used after the
// restore. False: the tensor has no cell.
bool tell_stream(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack) {
  const size_t n = op.schema().arguments().size();
  const c10::TensorImpl* t = (*stack)[stack->size() - n].toTensor().unsafeGetTensorImpl();
  Cell* c = t->has_storage() ? cell_of(t->unsafe_storage().unsafeGetStorageImpl()) : nullptr;
  if (!c) return false;
  struct Pinned {
    explicit Pinned(Cell* c) : cell(c), there(pin(c, c->last_touch.load(std::memory_order_relaxed))) {}
    ~Pinned() { unpin(cell); }
    Cell* const cell;
    const bool there;
  } pinned(c);
  if (pinned.there)
    call_below(op, below, stack);
  else
    stack->resize(stack->size() - n);
  return true;
}

// False for a sparse tensor: its `t` reads and swaps its indices.
bool is_view_of_storage(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const size_t n = op.schema().arguments().size();
  const c10::IValue* first = n > 0 ? &stack[stack.size() - n] : nullptr;
  return !first || !first->isTensor() || first->unsafeToTensorImpl()->has_storage();
}

// Runs the deferred steps that the op's arguments need. This comes before the pager's own work for the op, since those
// steps are ops, too.
C10_ALWAYS_INLINE void finish_pending(const c10::OperatorHandle& op, const OpInfo* info,
                                      const torch::jit::Stack& stack) {
  if (C10_LIKELY(pending_slices.load(std::memory_order_relaxed) == 0)) return;
  if (info->kind == OpClass::kMetadata || tl_running_recipes > 0) return;
  if (info->keeps) return finish_all_pending(the_session);
  if (info->kind == OpClass::kView && !info->tells_stream && is_view_of_storage(op, stack)) return;
  const size_t n = std::min(info->arguments, stack.size());
  for (size_t i = stack.size() - n; i < stack.size(); ++i) finish_pending_of(the_session, stack[i]);
}

// Pins the tensors that a composite reads by address, while the frame lives. A composite that reads all of them may
// write to them as well.
void pin_for_reader(Frame& frame, const OpInfo* info, const torch::jit::Stack& stack) {
  const size_t n = info->arguments;
  const bool all = info->reads_raw == RawReads::kAll;
  const bool lists = info->reads_raw == RawReads::kWeights && !the_session.pool->on_host();
  for (size_t i = stack.size() - std::min(n, stack.size()); i < stack.size(); ++i) {
    const c10::IValue& v = stack[i];
    const bool read = v.isTensor()
                          ? v.unsafeToTensorImpl()->has_storage() &&
                                (all || c10::isIntegralType(v.unsafeToTensorImpl()->dtype().toScalarType(), true))
                          : lists && v.isTensorList();
    if (read) frame.value(v, all);
  }
  frame.pin_all();
  frame.begin_writes();
}

// Torch's own composites that read by address: a packed sequence's batch sizes, for example.
template <c10::DispatchKey backend>
void composite_that_reads_raw(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Frame read(the_session);
  std::optional<InKernel> inside;
  if (the_session.open.load(std::memory_order_relaxed)) inside.emplace();
  std::optional<ForeignScope> scope;
  if (inside && the_session.open.load(std::memory_order_acquire) && tl_regions == 0) {
    OpInfo* info = info_of(op);
    finish_pending(op, info, *stack);
    pin_for_reader(read, info, *stack);
    if (info->reads_raw == RawReads::kAll) scope.emplace();  // the composite also reads the outputs of its ops
  }
  op.redispatchBoxed(c10::DispatchKeySet(backend), stack);  // the composite itself; its ops come to the pager's kernel
}

// Runs an op of a compiled region. Its outputs belong to the region until that ends. Its arguments may be other tensors
// than the region's: a custom op may have its own.
void of_region(const c10::OperatorHandle& op, OpInfo* info, c10::DispatchKeySet below, torch::jit::Stack* stack) {
  finish_pending(op, info, *stack);
  Frame frame(the_session, false);
  if (info->kind != OpClass::kView && info->kind != OpClass::kMetadata)
    touch_arguments(frame, info, stack->data() + stack->size() - info->arguments, info->arguments);
  frame.pin_all();
  frame.begin_writes();
  if (info->kind == OpClass::kForeign)
    op.redispatchBoxed(below, stack);  // its ops come to the pager's kernel
  else
    call_below(op, below, stack);
}

// In torch 2.11 the pager's key precedes Python's. Torch's way up to `__torch_dispatch__` excludes all keys that
// precede Python's, so ops that are called there would not be seen (rule 12). This function does the same, and does not
// exclude the pager's key.
constexpr bool kBeforePython = static_cast<uint16_t>(kKey) > static_cast<uint16_t>(c10::DispatchKey::Python);

void call_python(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (op.hasKernelForDispatchKey(c10::DispatchKey::Python)) {  // a library's own kernel
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
    return;
  }
  constexpr c10::DispatchKeySet before =
      (c10::DispatchKeySet(c10::DispatchKeySet::FULL) ^
       (c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Python) |
        c10::DispatchKeySet(c10::DispatchKey::Python)))
          .remove(c10::DispatchKey::ZeroTensor)
          .remove(c10::DispatchKey::Conjugate)
          .remove(c10::DispatchKey::Negative)
          .remove(kKey);
  c10::impl::ExcludeDispatchKeyGuard guard(before);
  (*c10::impl::getGlobalPyInterpreter())->dispatch(op, stack);
}

// Turns the pager's errors into Python's, at the outermost op.
template <class Run>
void with_our_errors(const Run& run) {
  try {
    run();
  } catch (const c10::OutOfMemoryError& e) {
    if (tl_depth == 0) raise_budget_error(e);
    throw;
  } catch (const WrongBytes& e) {
    if (tl_depth == 0) raise_wrong_bytes(e);
    throw;
  } catch (const c10::Error&) {
    throw;
  } catch (const std::exception&) {
    if (tl_depth == 0) raise_budget_error_of_python();
    throw;
  }
}

// Runs an op according to its class.
void run_op(const c10::OperatorHandle& op, OpInfo* info, c10::DispatchKeySet below, torch::jit::Stack* stack) {
  switch (info->kind) {
    case OpClass::kView:
      if (C10_UNLIKELY(info->tells_stream) && tell_stream(op, below, stack)) return;
      if (is_view_of_storage(op, *stack)) {
        call_below(op, below, stack);
        if (C10_UNLIKELY(tl_foreign && !stack->empty())) tl_foreign->keep(stack->back());
        if (C10_UNLIKELY(reducers_listening.load(std::memory_order_relaxed)) && !stack->empty())
          keep_accumulated(stack->back());
        return;
      }
      break;
    case OpClass::kComposite: {
      Frame read(the_session);
      std::optional<ForeignScope> scope;
      if (C10_UNLIKELY(info->reads_raw != RawReads::kNone)) pin_for_reader(read, info, *stack);
      if (C10_UNLIKELY(info->reads_raw == RawReads::kAll)) scope.emplace();
      op.redispatchBoxed(below, stack);
      return;
    }
    default:
      break;
  }
  if (C10_UNLIKELY(!op.hasSchema())) {
    op.redispatchBoxed(below, stack);
    return;
  }
  // A lazy clone shares its pointer, so it could not be evicted: a real copy can.
  if (C10_UNLIKELY(info->lazy_clone)) {
    static const auto clone = c10::Dispatcher::singleton().findSchemaOrThrow("aten::clone", "");
    stack->emplace_back();  // memory_format
    ordinary(clone, info_of(clone), below, stack);
    return;
  }
  with_our_errors([&] {
    if (C10_UNLIKELY(captures.load(std::memory_order_relaxed) > 0) && is_capturing(*the_session.pool))
      captured(op, info, below, stack);
    else
      try {
        ordinary(op, info, below, stack);
      } catch (const c10::OutOfMemoryError&) {
        if (tl_depth == 0) note_need(op, info, *stack);
        throw;
      }
  });
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (kBeforePython && C10_UNLIKELY(keys.has(c10::DispatchKey::Python))) return call_python(op, keys, stack);
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
  const bool done_in_child = forked_child.load(std::memory_order_relaxed) && totals.absent_cells.load() == 0;
  std::optional<InKernel> inside;
  if (C10_LIKELY(the_session.open.load(std::memory_order_relaxed))) inside.emplace();
  if (C10_UNLIKELY(!inside || !the_session.open.load(std::memory_order_acquire) || done_in_child)) {
    inside.reset();
    let_callbacks_rest(false);
    call_below(op, below, stack);
    return;
  }
  if (C10_UNLIKELY(listeners.load(std::memory_order_relaxed))) follow_listeners();
  OpInfo* info = info_of(op);
  if (C10_UNLIKELY(tl_regions > 0)) return of_region(op, info, below, stack);
  inside->count_op();
  finish_pending(op, info, *stack);
  if (!NestedOp::is_one(info, below)) return run_op(op, info, below, stack);
  std::optional<NestedOp> nested;
  with_our_errors([&] { nested.emplace(the_session, *stack, info->arguments); });
  run_op(op, info, below, stack);
  with_our_errors([&] { nested->returned(*stack, info->returns); });
}

}  // namespace

void keep_captured(Frame* frame) {
  frame->pin_all();
  frame->begin_writes();
  for (const Touched& t : frame->cells()) escape(t.cell, Escape::kCaptured);
  frame->end_newborns();
}

void follow_queue() {
  note_stream(the_session);
  if (C10_LIKELY(!unmarked().due())) return;
  mark_stream(the_session);
  end_comparisons_that_are_there();
}

const c10::BoxedKernel& boxed_kernel() {
  static const auto kernel = c10::BoxedKernel::makeFromFunction<&fallback>();
  return kernel;
}

void adopt_results(OpInfo* info, const torch::jit::Stack& results, const OldStorages& old) {
  c10::SmallVector<Cell*, 4> made;
  adopt_outputs(info, results, results.size(), old, &made);
  if (made.empty() || !is_noted()) return;
  Moment moment(the_session);
  moment.ended(info, made.data(), made.size(), 0, 0);
  moment.left();
}

void rethrow_as_ours() {
  with_our_errors([] { throw; });
  std::terminate();  // it has thrown
}

void rethrow_as_ours(const c10::OperatorHandle& op, const OpInfo* info, const torch::jit::Stack& arguments) {
  if (tl_depth == 0) note_need(op, info, arguments);
  rethrow_as_ours();
}

void evict_touched(Frame* frame, bool by_turns) {
  c10::SmallVector<std::pair<Cell*, StoragePtr>, 8> out;
  {
    const Hold lock(graph_lock());
    for (const Touched& t : frame->cells())
      if (by_turns || may_be_dropped_locked(t.cell))
        if (StoragePtr held = hold(t.cell)) out.emplace_back(t.cell, std::move(held));
  }
  frame->release();
  static std::atomic<int> turn{0};
  for (auto& [cell, held] : out) {
    if (cell_of(held.get()) == cell)
      evict(cell, EvictedFor::kAfterOp, by_turns && turn++ % 2 ? Way::kOffload : Way::kEvict);
    drop(std::move(held));
  }
}

TORCH_LIBRARY_IMPL(aten, AutogradCPU, m) {
  for (const RawReader& reader : raw_readers())
    if (reader.on_cpu)
      m.impl(reader.name,
             torch::CppFunction::makeFromBoxedFunction<&composite_that_reads_raw<c10::DispatchKey::CPU>>());
}

// On an accelerator: ops that read weights by address there. Integers that the other ops read lie on the CPU, where
// such a budget has no cells.
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) {
  for (const RawReader& reader : raw_readers())
    if (reader.reads == RawReads::kWeights)
      m.impl(reader.name,
             torch::CppFunction::makeFromBoxedFunction<&composite_that_reads_raw<c10::DispatchKey::CUDA>>());
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  for (const RawReader& reader : raw_readers())
    if (reader.reads == RawReads::kWeights)
      m.impl(reader.name,
             torch::CppFunction::makeFromBoxedFunction<&composite_that_reads_raw<c10::DispatchKey::PrivateUse1>>());
}

// Until now a kernel that passes the op on had this place (memmgr/native/dispatch.py). Torch registers no kernel at a
// place that is taken. If the old one were removed first, ops of other threads would find no kernel for a moment. So
// the pager's kernel replaces it. The member is private.
using Fallbacks = std::array<c10::impl::AnnotatedKernel, c10::num_runtime_entries>;
template <Fallbacks c10::Dispatcher::* member>
struct Reached {
  friend Fallbacks& fallbacks_of(c10::Dispatcher& dispatcher) { return dispatcher.*member; }
};
Fallbacks& fallbacks_of(c10::Dispatcher& dispatcher);
template struct Reached<&c10::Dispatcher::backendFallbackKernels_>;

const bool place_is_free = [] {
  fallbacks_of(c10::Dispatcher::singleton())[c10::getDispatchTableIndexForDispatchKey(kKey)] = {};
  return true;
}();  // before the registration below: the statics of a file are initialized in order

TORCH_LIBRARY_IMPL(_, Fake, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace memmgr::pager
