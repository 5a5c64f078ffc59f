#include "kernel.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <cstring>

#include "admission.h"
#include "budget.h"
#include "captures.h"
#include "escape.h"
#include "foreign.h"
#include "frame.h"
#include "hold.h"
#include "list_ops.h"
#include "ops.h"
#include "pools/pool.h"
#include "recipe.h"
#include "reclaim.h"
#include "reducer.h"
#include "rematerialize.h"
#include "rng.h"
#include "streams.h"
#include "threads.h"
#include "timeline.h"
#include "works.h"

namespace memmgr::pager {

namespace {

// ---- the op ----

void call_below(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard guard(kKey);
  op.redispatchBoxed(below, stack);
}

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

// The storages of the outputs on top of the stack, in order; null where there is none.
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

bool newly_large(const c10::StorageImpl* s) {
  return s && !cell_of(s) && adoptable(s) && s->nbytes() >= budget.options.small_bytes;
}

// What an op that nobody records has made: cells, and newborns where nobody has written yet (rule 3).
void adopt_outputs(const OpInfo* info, const torch::jit::Stack& stack, size_t returns,
                   c10::SmallVector<Cell*, 4>* made) {
  c10::SmallVector<c10::StorageImpl*, 4> storages;
  collect_outputs(stack, returns, &storages);
  for (c10::StorageImpl* s : storages) {
    if (!newly_large(s)) continue;
    Cell* c = adopt(s, info->uninitialized ? 1 : 0);
    if (c) made->push_back(c);
    if (!c || !info->uninitialized) continue;
    {
      std::lock_guard<std::mutex> lock(graph_lock());
      begin_newborn_locked(c);
    }
    unpin(c);
  }
}

// Foreign code may take their addresses next.
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

// Will an output be large enough to be a cell, though no argument is? What this misses is a root.
bool may_make_large(const OpInfo* info, const c10::IValue* args, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    if (args[i].isTensor()) {
      if (info->kind != OpClass::kMetadata) return false;
      const c10::TensorImpl* t = args[i].unsafeToTensorImpl();
      return t->has_storage() && static_cast<uint64_t>(t->numel()) * 16 >= budget.options.small_bytes;
    }
    if (args[i].isList() && !args[i].isIntList()) return false;
    if (args[i].isIntList()) {
      uint64_t elements = 1;
      for (const int64_t size : args[i].toIntVector()) elements *= static_cast<uint64_t>(size);
      return elements * 16 >= budget.options.small_bytes;
    }
  }
  return false;
}

// Without gradient an op's inputs are mostly written before anybody needs its outputs again.
bool records(const OpInfo* info) { return info->recordable && (c10::GradMode::is_enabled() || info->fills); }

// Everything that one try of an op does; what it throws may be mended by the caller.
class Call {
 public:
  Call(const c10::OperatorHandle& op, OpInfo* info, c10::DispatchKeySet below, torch::jit::Stack* stack)
      : op_(op), info_(info), below_(below), stack_(stack) {}

  void run(Frame& frame) {
    const size_t n = info_->arguments;
    const c10::IValue* args = stack_->data() + stack_->size() - n;
    frame.pin_all();
    // What was touched is not reclaimed before we are through, whoever is told to make room.
    if (records(info_) && !tl_foreign && !budget.forked && !captures.load() &&
        (frame.bytes() > 0 || may_make_large(info_, args, n)))
      record(frame, args, n);
    if (frame.writes()) {
      frame.begin_writes();
      began_writes = true;
    }
    began_writes |= frame.declares_writes() || info_->kind == OpClass::kForeign;
    const uint64_t stalled = waited_ns();
    const uint64_t begun = ticks();
    if (tl_depth == 1) {
      begin_scratch();
      tl_side = info_->dear ? MM_SIDE_HIGH : MM_SIDE_LOW;
    }
    if (info_->seeded) drew = true;
    // Nobody draws between another's noting of the state and its draw.
    if (info_->seeded && !drawing_.owns_lock() && info_->kind != OpClass::kForeign) drawing_ = begin_drawing();
    if (info_->kind != OpClass::kForeign || is_collective()) {
      call_below(op_, below_, stack_);
    } else {
      std::optional<ForeignScope> scope;
      if (info_->native) scope.emplace();
      op_.redispatchBoxed(below_, stack_);
    }
    if (drawing_.owns_lock()) drawing_.unlock();
    seconds = seconds_of_ticks(ticks() - begun);
    const uint64_t stall = waited_ns() - stalled;
    if (stall) seconds = std::max(1e-7, seconds - static_cast<double>(stall) * 1e-9);
    if (tl_depth == 1 && frame.bytes() + scratch_peak() > 0) {
      note_scratch(scratch_peak());
      note_working_set(frame.cells().size(), [&](size_t i) { return frame.cells()[i].cell; });
    }
    frame.end_newborns();
    outputs(frame);
  }

  void give_up() { discard(std::move(recipe_)); }

  bool began_writes = false;
  bool drew = false;
  double seconds = 0;
  c10::SmallVector<Cell*, 4> made;

 private:
  bool is_collective() const { return op_.schema().name().compare(0, 6, "c10d::") == 0; }

  void note_scratch(uint64_t bytes) {
    const uint64_t known = info_->scratch_bytes.load(std::memory_order_relaxed);
    info_->scratch_bytes.store(std::max(bytes, known - known / 4), std::memory_order_relaxed);
  }

  // Is there room for a trial, which takes so much? Without a limit only below what was there at some time before, so
  // that to measure a run changes nothing of what it needs.
  static bool may_try(const Kind* kind, uint64_t bytes) {
    constexpr uint32_t kMostInVain = 8;  // trials for which others had to leave
    const uint64_t limit = mm_arena_budget(budget.arena);
    const bool measures = limit >= MM_UNLIMITED && !budget.options.torture;
    if (!measures && kind->trials.load(std::memory_order_relaxed) < kMostInVain) return true;
    return mm_arena_resident(budget.arena) + bytes <=
           (measures ? most_resident.load(std::memory_order_relaxed) : limit);
  }

  void record(Frame& frame, const c10::IValue* args, size_t n) {
    if (info_->seeded) drawing_ = begin_drawing();
    recipe_ = describe(info_, below_, args, n);
    if (drawing_.owns_lock() && !(recipe_ && recipe_->rng.defined())) drawing_.unlock();
    if (!recipe_) return;
    recipe_->filled = info_->fills && !c10::GradMode::is_enabled();
    if (info_->writes == 0 || recipe_->kind->trust.load(std::memory_order_relaxed) != Trust::kNew) return;
    // The first of its kind that writes in place: what it is going to write to, for the second run.
    for (const TensorArg& a : recipe_->tensors)
      if (a.role == Role::kWritten && a.version->cell) {
        Cell* c = a.version->cell;
        if (!may_try(recipe_->kind, c->nbytes)) return;
        try {
          before_ = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
                                                          static_cast<int64_t>(c->nbytes), c->pool->allocate(c->nbytes),
                                                          c->pool->allocator(), false);
        } catch (const c10::OutOfMemoryError&) {
          return;  // no room for a trial: another time
        }
        c->pool->copy(pointer_of(before_.get()).get(), c->bytes.get(), c->nbytes);
      }
  }

  void outputs(Frame& frame) {
    c10::SmallVector<c10::StorageImpl*, 4> storages;
    const size_t returns = info_->returns;
    if (info_->kind == OpClass::kForeign && is_collective()) keep_until_done(frame, returns);
    if (info_->writes && recipe_) attach_write(frame);
    collect_outputs(*stack_, returns, &storages);
    c10::SmallVector<Version*, 4> versions(storages.size(), nullptr);
    bool any = false;
    {
      Trash trash;
      std::unique_lock<std::mutex> lock(graph_lock(), std::defer_lock);
      for (size_t i = 0; i < storages.size(); ++i) {
        if (!newly_large(storages[i])) continue;
        if (!lock.owns_lock()) lock.lock();
        Cell* c = adopt_locked(storages[i], 1);
        if (!c) continue;
        frame.take_pin(c);
        made.push_back(c);
        versions[i] = c->version;
        any = true;
        if (info_->uninitialized) begin_newborn_locked(c);
      }
      if (C10_LIKELY(any && recipe_ && is_trusted())) {  // under the one lock: most ops that are recorded end here
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
    for (size_t i = 0; i < storages.size(); ++i)
      if (!versions[i]) storages[i] = nullptr;
    try_kind(storages);
    attach_if_trusted(versions);
  }

  bool is_trusted() const { return recipe_->kind->trust.load(std::memory_order_relaxed) == Trust::kYes; }

  void attach_if_trusted(c10::ArrayRef<Version*> versions) {
    if (!is_trusted()) {
      give_up();
      return;
    }
    {
      Trash trash;
      std::lock_guard<std::mutex> lock(graph_lock());
      attach_locked(std::move(recipe_), versions, &trash);
    }
    keep_recipes_few();
  }

  void attach_write(const Frame& frame) {
    Cell* written = nullptr;
    for (const Touched& t : frame.cells())
      if (t.written) written = t.cell;
    if (!written || !(written->state.load() & kPinMask) || (written->state.load() & kDead)) {
      give_up();
      return;
    }
    c10::StorageImpl* s = nullptr;
    {
      std::lock_guard<std::mutex> lock(graph_lock());
      s = static_cast<c10::StorageImpl*>(written->storage._unsafe_get_target());
    }
    if (!s || cell_of(s) != written) {
      give_up();
      return;
    }
    note_run();
    try_kind(s);
    attach_if_trusted(written->version);
  }

  // What is queued has hardly begun: of those the trial says how long they take.
  void note_run() {
    if (C10_LIKELY(!queues))
      note_seconds(recipe_->kind, seconds);
    else
      seconds = std::max(seconds, recipe_->kind->seconds.load(std::memory_order_relaxed));
  }

  // Rule 8: twice at its first use, and compared.
  void try_kind(c10::ArrayRef<c10::StorageImpl*> left) {
    Kind* kind = recipe_->kind;
    if (kind->trust.load(std::memory_order_relaxed) != Trust::kNew) return;
    for (const TensorArg& a : recipe_->tensors)
      if (a.role == Role::kWritten && !before_) return;
    if (!may_try(kind, scratch_peak())) return;
    try {
      const bool same = reproduces(*recipe_, left, std::move(before_));
      if (same && left.size() == 1 && left[0] && budget.pool->on_host()) {
        mm_bits bits{};
        kind->bits_bytes = mm_bits_pack(pointer_of(left[0]).get(), left[0]->nbytes(), &bits);
        if (kind->bits_bytes) mm_bits_free(&bits);
      }
      kind->trust.store(same ? Trust::kYes : Trust::kNo);
      if (!same) counters.refused_kinds++;
    } catch (const c10::OutOfMemoryError&) {
      kind->trials++;  // no room for a second result: another time
    } catch (const c10::Error&) {
      kind->trust.store(Trust::kNo);
      counters.refused_kinds++;
    }
  }

  void keep_until_done(Frame& frame, size_t returns) {
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

  const c10::OperatorHandle& op_;
  OpInfo* info_;
  c10::DispatchKeySet below_;
  torch::jit::Stack* stack_;
  std::unique_ptr<Recipe> recipe_;
  std::unique_lock<std::mutex> drawing_;  // from noting the generator's state until the op has drawn
  StoragePtr before_;
};

// The trap met by somebody inside the op who reads a tensor that no argument shows: it comes back, pinned.
bool bring_back_trapped(const char* what, std::optional<Frame>* frame) {
  const uint64_t id = trapped_cell(what);
  if (!id) return false;
  Cell* found = nullptr;
  StoragePtr storage;
  {
    std::lock_guard<std::mutex> lock(graph_lock());
    for_each_cell_locked([&](Cell* c) {
      if (reinterpret_cast<uintptr_t>(c) == id) found = c;
    });
    if (!found) return false;
    storage = hold(found);
    if (!storage) return false;
    if (!*frame) frame->emplace();
    (*frame)->add_pinned(found);
  }
  bring_back(found);
  drop(std::move(storage));
  return true;
}

void page(const c10::OperatorHandle& op, OpInfo* info, c10::DispatchKeySet below, torch::jit::Stack* stack,
          Moment* moment) {
  if (C10_UNLIKELY(queues)) note_stream();
  Depth depth;
  std::optional<Admitted> admitted;  // ends after the pins
  Frame frame;
  std::optional<Frame> extra;  // for tensors that no argument shows
  const size_t n = info->arguments, base = stack->size() - n;
  const c10::IValue* args = stack->data() + base;
  if (info->kind != OpClass::kMetadata) touch_arguments(frame, info, args, n);
  if (works_in_flight()) poll_works();
  if (C10_LIKELY(frame.empty() && !frame.writes() && info->kind != OpClass::kForeign && !info->seeded) &&
      !(records(info) && may_make_large(info, args, n))) {
    // Small tensors only, nothing of ours to change and nothing to note.
    const size_t returns = info->returns;
    call_below(op, below, stack);
    c10::SmallVector<Cell*, 4> made;
    adopt_outputs(info, *stack, returns, &made);
    if (C10_UNLIKELY(moment && !made.empty())) moment->ended(info, made.data(), made.size(), 0, 0);
    if (C10_UNLIKELY(tl_foreign != nullptr)) keep_outputs(*stack, returns);
    return;
  }
  if (C10_UNLIKELY(moment && !frame.empty())) moment->begins(info, frame);
  const uint64_t need = frame.bytes() + info->scratch_bytes.load(std::memory_order_relaxed);
  bool alone = false;
  // Kept only where a second try may be needed: somebody's bytes are absent, or somebody else runs.
  c10::SmallVector<c10::IValue, 10> copy;
  const bool may_retry =
      absent_cells.load(std::memory_order_relaxed) > 0 || others_are_running() || others_have_newborns();
  constexpr int kMostPauses = 40;
  int pauses = 0;
  if (may_retry) copy.append(args, args + n);
  for (int attempt = 0;; ++attempt) {
    Call call(op, info, below, stack);
    try {
      if (tl_depth == 1 && !budget.forked) admitted.emplace(need, alone);
      call.run(frame);
      if (C10_UNLIKELY(moment != nullptr))
        moment->ended(info, call.made.data(), call.made.size(), call.seconds, scratch_peak());
      break;
    } catch (const c10::OutOfMemoryError&) {
      call.give_up();
      if (!may_retry || tl_depth > 1 || call.began_writes || call.drew) throw;
      if (alone && (++pauses > kMostPauses || !others_have_newborns())) throw;
      alone = true;
      counters.retries++;
    } catch (const c10::Error& e) {
      call.give_up();
      if (!may_retry || attempt >= 16 || call.began_writes || call.drew || !bring_back_trapped(e.what(), &extra)) throw;
      counters.trap_retries++;
    } catch (...) {
      call.give_up();
      throw;
    }
    frame.release();
    admitted.reset();
    if (pauses > 0) wait_for_others(0.005);  // until they have touched what they have made
    stack->resize(base);
    stack->insert(stack->end(), copy.begin(), copy.end());
    if (info->kind != OpClass::kMetadata) touch_arguments(frame, info, stack->data() + base, n);
  }
  if (C10_UNLIKELY(tl_foreign != nullptr)) tl_foreign->keep(frame);
  if (C10_UNLIKELY(reducers_listening.load(std::memory_order_relaxed))) keep_accumulated(frame);
  if (C10_UNLIKELY(budget.options.torture && tl_depth == 1)) {
    c10::SmallVector<std::pair<Cell*, StoragePtr>, 8> out;
    for (const Touched& t : frame.cells()) {
      StoragePtr held;
      {
        std::lock_guard<std::mutex> lock(graph_lock());
        held = hold(t.cell);
      }
      if (held) out.emplace_back(t.cell, std::move(held));
    }
    frame.release();
    extra.reset();
    static std::atomic<int> turn{0};
    for (auto& [cell, held] : out) {
      if (cell_of(held.get()) == cell) let_go(cell, turn++ % 2 ? Way::kOffload : Way::kEvict);
      drop(std::move(held));
    }
  }
}

void ordinary(const c10::OperatorHandle& op, OpInfo* info, c10::DispatchKeySet below, torch::jit::Stack* stack) {
  if (C10_UNLIKELY(info->list_op) &&
      run_in_slices(info, stack, [&](torch::jit::Stack* slice) { ordinary(op, info, below, slice); }))
    return;
  if (C10_LIKELY(!timeline_on.load(std::memory_order_relaxed)) || tl_depth > 0 || tl_running_recipes > 0) {
    page(op, info, below, stack, nullptr);
    return;
  }
  Moment moment;
  page(op, info, below, stack, &moment);
  moment.left();
}

// What a graph has touched lies in it as an address.
void captured(const c10::OperatorHandle& op, OpInfo* info, c10::DispatchKeySet below, torch::jit::Stack* stack) {
  Depth depth;
  Frame frame;
  touch_arguments(frame, info, stack->data() + stack->size() - info->arguments, info->arguments);
  frame.pin_all();
  frame.begin_writes();
  for (const Touched& t : frame.cells()) escape(t.cell, Escape::kCaptured);
  frame.end_newborns();
  const size_t returns = info->returns;
  call_below(op, below, stack);
  c10::SmallVector<Cell*, 4> made;
  adopt_outputs(info, *stack, returns, &made);
  for (Cell* c : made) escape(c, Escape::kCaptured);
}

// Of a block that has gone there is nothing to say: what comes back is told as it is used. False: not a cell's.
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

// A sparse tensor's `t` reads and swaps its indices.
bool is_view_of_storage(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const size_t n = op.schema().arguments().size();
  const c10::IValue* first = n > 0 ? &stack[stack.size() - n] : nullptr;
  return !first || !first->isTensor() || first->unsafeToTensorImpl()->has_storage();
}

// What a composite reads raw, in memory while the frame lives. Such a one may write as well.
void pin_for_reader(Frame& frame, const OpInfo* info, const torch::jit::Stack& stack) {
  const size_t n = info->arguments;
  const bool all = info->reads_raw == RawReads::kAll;
  for (size_t i = stack.size() - std::min(n, stack.size()); i < stack.size(); ++i)
    if (stack[i].isTensor() && stack[i].unsafeToTensorImpl()->has_storage() &&
        (all || c10::isIntegralType(stack[i].unsafeToTensorImpl()->dtype().toScalarType(), true)))
      frame.value(stack[i], all);
  frame.pin_all();
  frame.begin_writes();
}

// Torch's own composites that read raw: a packed sequence's batch sizes, say.
void composite_that_reads_raw(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Frame read;
  std::optional<InKernel> inside;
  if (budget.open.load(std::memory_order_relaxed)) inside.emplace();
  std::optional<ForeignScope> scope;
  if (inside && budget.open.load(std::memory_order_acquire) && tl_regions == 0) {
    OpInfo* info = info_of(op);
    pin_for_reader(read, info, *stack);
    if (info->reads_raw == RawReads::kAll) scope.emplace();  // what its ops make it reads as well
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);  // the composite itself; its ops find us again
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
  const bool done_in_child = budget.forked.load(std::memory_order_relaxed) && absent_cells.load() == 0;
  std::optional<InKernel> inside;
  if (C10_LIKELY(budget.open.load(std::memory_order_relaxed))) inside.emplace();
  if (C10_UNLIKELY(!inside || !budget.open.load(std::memory_order_acquire) || tl_regions > 0 || done_in_child)) {
    inside.reset();
    call_below(op, below, stack);
    return;
  }
  OpInfo* info = info_of(op);
  inside->count_op();
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
      Frame read;
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
  if (C10_UNLIKELY(info->lazy_clone)) {  // a shared pointer could not leave: a copy of its own can
    static const auto clone = c10::Dispatcher::singleton().findSchemaOrThrow("aten::clone", "");
    stack->emplace_back();  // memory_format
    ordinary(clone, info_of(clone), below, stack);
    return;
  }
  try {
    if (C10_UNLIKELY(captures.load(std::memory_order_relaxed) > 0) && is_capturing())
      captured(op, info, below, stack);
    else
      ordinary(op, info, below, stack);
  } catch (const c10::OutOfMemoryError& e) {
    if (tl_depth == 0) raise_budget_error(e);
    throw;
  } catch (const WrongBytes& e) {
    if (tl_depth == 0) raise_wrong_bytes(e);
    throw;
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, AutogradCPU, m) {
  for (const RawReader& reader : raw_readers())
    m.impl(reader.name, torch::CppFunction::makeFromBoxedFunction<&composite_that_reads_raw>());
}

TORCH_LIBRARY_IMPL(_, Fake, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace memmgr::pager
