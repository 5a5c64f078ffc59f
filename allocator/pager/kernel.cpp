#include "kernel.h"

#include <ATen/Parallel.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pthread.h>
#include <torch/library.h>

#include <chrono>
#include <cstring>
#include <list>

#include "budget.h"
#include "ops.h"
#include "pools/pool.h"
#include "recipe.h"
#include "reclaim.h"
#include "rematerialize.h"
#include "rng.h"

namespace memmgr::pager {

namespace {

// Ops that are under way in this thread: an op inside another has been admitted with it.
thread_local int tl_depth = 0;
thread_local int tl_regions = 0;

// ---- admission (rule 3): an op states what it will pin before it pins, and waits with nothing pinned ----

struct Admission {
  std::atomic<uint64_t> bytes{0};
  std::atomic<int> ops{0};
  std::atomic<int> waiting{0};
  std::mutex lock;
  std::condition_variable changed;
};

Admission& admission() {
  static auto* a = new Admission;
  return *a;
}

bool fits(uint64_t bytes) {
  const uint64_t limit = mm_arena_budget(budget.arena);
  if (limit == MM_UNLIMITED) return true;
  const uint64_t all = mm_arena_resident(budget.arena), paged = resident_cell_bytes.load(std::memory_order_relaxed);
  const uint64_t fixed = all - std::min(all, paged);
  return bytes + fixed <= limit;
}

class Admitted {
 public:
  // alone: wait until nobody else runs.
  Admitted(uint64_t bytes, bool alone) : bytes_(bytes) {
    Admission& a = admission();
    const uint64_t total = a.bytes.fetch_add(bytes) + bytes;
    const int ops = a.ops.fetch_add(1) + 1;
    if (C10_LIKELY(ops == 1 || (!alone && fits(total)))) return;
    a.bytes.fetch_sub(bytes);
    a.ops.fetch_sub(1);
    counters.admission_waits++;
    WithoutGil released;
    std::unique_lock<std::mutex> lock(a.lock);
    a.waiting++;
    for (;;) {
      const uint64_t now = a.bytes.fetch_add(bytes) + bytes;
      const int running = a.ops.fetch_add(1) + 1;
      if (running == 1 || (!alone && fits(now))) break;
      a.bytes.fetch_sub(bytes);
      a.ops.fetch_sub(1);
      // Bounded, because what is fixed changes without anybody's telling.
      a.changed.wait_for(lock, std::chrono::milliseconds(5));
    }
    a.waiting--;
  }
  ~Admitted() {
    Admission& a = admission();
    a.bytes.fetch_sub(bytes_);
    a.ops.fetch_sub(1);
    if (C10_UNLIKELY(a.waiting.load(std::memory_order_relaxed) > 0)) {
      std::lock_guard<std::mutex> lock(a.lock);
      a.changed.notify_all();
    }
  }

 private:
  uint64_t bytes_;
};

// Memory of torch's default allocator counts from here on: others leave for it first.
void make_room_for(const c10::StorageImpl* s) {
  if (pointer_of(s).get_deleter() == pool_deleter()) return;
  const uint64_t limit = mm_arena_budget(budget.arena), all = mm_arena_resident(budget.arena) + s->nbytes();
  if (all <= limit) return;
  uint64_t released = 0;
  for (int i = 0; released < all - limit; ++i) {
    const uint64_t n = reclaim_callback(nullptr, all - limit - released, s->nbytes(), i);
    if (!n) throw_out_of_memory(s->nbytes());
    released += n;
  }
}

// ---- what an op touches ----

struct Touched {
  Cell* cell;
  bool written;
};

class Frame {
 public:
  Frame() = default;
  ~Frame() { release(); }
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;

  void tensor(c10::TensorImpl* t, bool written) {
    if (C10_LIKELY(t->has_storage())) {
      storage(t->unsafe_storage().unsafeGetStorageImpl(), written);
      return;
    }
    // Sparse tensors read their parts without an op.
    if (t->layout() == c10::kSparse) {
      auto* sparse = static_cast<at::SparseTensorImpl*>(t);
      tensor(sparse->indices().unsafeGetTensorImpl(), written);
      tensor(sparse->values().unsafeGetTensorImpl(), written);
    } else if (at::sparse_csr::is_sparse_compressed(t->layout())) {
      auto* sparse = static_cast<at::SparseCsrTensorImpl*>(t);
      tensor(sparse->compressed_indices().unsafeGetTensorImpl(), written);
      tensor(sparse->plain_indices().unsafeGetTensorImpl(), written);
      tensor(sparse->values().unsafeGetTensorImpl(), written);
    }
  }

  void storage(c10::StorageImpl* s, bool written) {
    if (!s) return;
    Cell* c = cell_of(s);
    if (C10_UNLIKELY(!c)) {
      if (!adoptable(s) || s->nbytes() < budget.options.small_bytes) return;
      make_room_for(s);
      c = adopt(s);
      if (!c) return;
    }
    if (c->small) {
      if (written) small_writes_.push_back(c);
      return;
    }
    cells_.push_back({c, written});
    bytes_ += c->nbytes;
  }

  void value(const c10::IValue& v, bool written) {
    if (v.isTensor()) {
      tensor(v.unsafeToTensorImpl(), written);
    } else if (v.isList()) {
      for (const c10::IValue& item : v.toListRef()) value(item, written);
    } else if (v.isStorage()) {
      storage(v.toStorage().unsafeGetStorageImpl(), written);
    } else if (v.isTuple()) {
      for (const c10::IValue& item : v.toTupleRef().elements()) value(item, written);
    } else if (v.isGenericDict()) {
      for (const auto& entry : v.toGenericDict()) value(entry.value(), written);
    }
  }

  // After this all cells are pinned and resident.
  void pin_all() {
    const uint64_t now = ticks();
    bool all = true;
    for (const Touched& t : cells_) {
      all &= pin(t.cell, now);
      ++pinned_;
    }
    if (C10_LIKELY(all)) return;
    try {
      for (const Touched& t : cells_) bring_back(t.cell);
    } catch (const c10::OutOfMemoryError&) {
      if (!budget.tier || !one_by_one()) throw;
    }
  }

  void release() {
    while (pinned_ > 0) {
      Cell* c = cells_[--pinned_].cell;
      watch_writes(c);
      unpin(c);
    }
    cells_.clear();
    small_writes_.clear();
    bytes_ = 0;
  }

  // Pins that somebody else gives back.
  std::vector<Cell*> hand_over() {
    std::vector<Cell*> taken;
    for (size_t i = 0; i < pinned_; ++i) taken.push_back(cells_[i].cell);
    pinned_ = 0;
    return taken;
  }

  // Before the op: what is written gets a new version, and whoever needs the old bytes has them (rule 4).
  void begin_writes() {
    for (Cell* c : small_writes_) begin_write(c);
    for (const Touched& t : cells_)
      if (t.written) begin_write(t.cell);
  }

  bool writes() const {
    if (!small_writes_.empty()) return true;
    for (const Touched& t : cells_)
      if (t.written) return true;
    return false;
  }

  // An op has touched them: they hold what somebody wrote there.
  void end_newborns() {
    for (const Touched& t : cells_)
      if (C10_UNLIKELY(t.cell->newborn)) {
        std::lock_guard<std::mutex> lock(graph_lock());
        if (!t.cell->newborn) continue;
        t.cell->newborn = false;
        stand_unpinned_locked(t.cell);
      }
  }

  uint64_t bytes() const { return bytes_; }
  bool empty() const { return cells_.empty(); }
  const c10::SmallVector<Touched, 12>& cells() const { return cells_; }
  void add_pinned(Cell* c) {  // an output
    pin(c, ticks());
    cells_.push_back({c, false});
    std::swap(cells_[pinned_], cells_.back());
    ++pinned_;
  }

 private:
  // What is made again takes room beside what the op holds already. With a tier each is made with nothing else pinned
  // and written below; after that all that is left is to read them back.
  bool one_by_one() {
    const auto unpin_all = [&] {
      while (pinned_ > 0) unpin(cells_[--pinned_].cell);
    };
    c10::SmallVector<StoragePtr, 8> held;  // what is unpinned may not end
    bool any = false;
    {
      std::lock_guard<std::mutex> lock(graph_lock());
      for (const Touched& t : cells_) {
        any |= t.cell->version && t.cell->version->evicted;
        held.push_back(hold(t.cell));
        if (!held.back()) any = false;
      }
    }
    if (any) {
      unpin_all();
      for (const Touched& t : cells_) {
        pin(t.cell, ticks());
        pinned_ = 0;
        try {
          bring_back(t.cell);
        } catch (...) {
          unpin(t.cell);
          throw;
        }
        unpin(t.cell);
        let_go(t.cell, 1);
      }
      for (const Touched& t : cells_) {
        pin(t.cell, ticks());
        ++pinned_;
      }
      for (const Touched& t : cells_) bring_back(t.cell);
    }
    for (StoragePtr& s : held)
      if (s) drop_later(std::move(s));
    return any;
  }

  static void begin_write(Cell* c) {
    settle_before_write(c);
    drop_slot(c);
    Trash trash;
    std::lock_guard<std::mutex> lock(graph_lock());
    new_version_locked(c, &trash);
  }

  c10::SmallVector<Touched, 12> cells_;
  c10::SmallVector<Cell*, 4> small_writes_;
  size_t pinned_ = 0;
  uint64_t bytes_ = 0;
};

// ---- asynchronous work ----

std::atomic<uint64_t> in_flight_bytes{0};

struct InFlight {
  c10::weak_intrusive_ptr<c10::intrusive_ptr_target> work;
  std::vector<Cell*> pinned;
};

struct Works {
  std::mutex lock;
  std::list<InFlight> all;
  std::atomic<size_t> count{0};
};

Works& works() {
  static auto* w = new Works;
  return *w;
}

// ---- the op ----

struct Depth {
  Depth() { ++tl_depth; }
  ~Depth() { --tl_depth; }
};

void call_below(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard guard(kKey);
  op.redispatchBoxed(below, stack);
}

void touch_arguments(Frame& frame, const OpInfo* info, const c10::IValue* args, size_t n) {
  const bool statistics = info->training >= 0 && args[info->training].isBool() && args[info->training].toBool();
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
void adopt_outputs(const OpInfo* info, const torch::jit::Stack& stack, size_t returns) {
  c10::SmallVector<c10::StorageImpl*, 4> storages;
  collect_outputs(stack, returns, &storages);
  for (c10::StorageImpl* s : storages) {
    if (!newly_large(s)) continue;
    Cell* c = adopt(s);
    if (!c || !info->uninitialized) continue;
    std::lock_guard<std::mutex> lock(graph_lock());
    c->version->uninitialized = true;
    c->newborn = true;
    stand_pinned_locked(c);
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

// Everything that one try of an op does; what it throws may be mended by the caller.
class Call {
 public:
  Call(const c10::OperatorHandle& op, OpInfo* info, c10::DispatchKeySet below, torch::jit::Stack* stack)
      : op_(op), info_(info), below_(below), stack_(stack) {}

  void run(Frame& frame) {
    const size_t n = op_.schema().arguments().size();
    const c10::IValue* args = stack_->data() + stack_->size() - n;
    frame.pin_all();
    // What was touched is not reclaimed before we are through, whoever is told to make room.
    if (info_->recordable && c10::GradMode::is_enabled() && (frame.bytes() > 0 || may_make_large(info_, args, n)))
      record(frame, args, n);
    std::unique_lock<std::mutex> drawing;
    if (recipe_ && recipe_->rng.defined()) drawing = std::unique_lock<std::mutex>(drawing_lock(), std::adopt_lock);
    if (frame.writes()) {
      frame.begin_writes();
      began_writes = true;
    }
    const uint64_t stalled = counters.stall_ns.load(std::memory_order_relaxed);
    const uint64_t begun = ticks();
    if (tl_depth == 1) begin_scratch();
    if (info_->seeded) drew = true;
    if (info_->kind == OpClass::kForeign && !is_collective())
      op_.redispatchBoxed(below_, stack_);
    else
      call_below(op_, below_, stack_);
    if (drawing.owns_lock()) drawing.unlock();
    double seconds = seconds_of_ticks(ticks() - begun);
    const uint64_t stall = counters.stall_ns.load(std::memory_order_relaxed) - stalled;
    if (stall) seconds = std::max(1e-7, seconds - static_cast<double>(stall) * 1e-9);
    if (tl_depth == 1 && frame.bytes() + scratch_peak() > 0) {
      note_scratch(scratch_peak());
      note_floor_now(frame);
    }
    frame.end_newborns();
    outputs(frame, seconds);
  }

  void give_up() { discard(std::move(recipe_)); }

  bool began_writes = false;
  bool drew = false;

 private:
  bool is_collective() const { return op_.schema().name().compare(0, 6, "c10d::") == 0; }

  void note_scratch(uint64_t bytes) {
    const uint64_t known = info_->scratch_bytes.load(std::memory_order_relaxed);
    info_->scratch_bytes.store(std::max(bytes, known - known / 4), std::memory_order_relaxed);
  }

  // The floor: what this op had pinned, its own memory, and what can never leave.
  static void note_floor_now(const Frame& frame) {
    const uint64_t all = mm_arena_resident(budget.arena), paged = resident_cell_bytes.load(std::memory_order_relaxed);
    const uint64_t fixed = all - std::min(all, paged) + escaped_bytes.load(std::memory_order_relaxed) +
                           in_flight_bytes.load(std::memory_order_relaxed);
    uint64_t pinned = 0;
    for (size_t i = 0; i < frame.cells().size(); ++i) {
      bool again = false;
      for (size_t k = 0; k < i; ++k) again |= frame.cells()[k].cell == frame.cells()[i].cell;
      if (!again) pinned += frame.cells()[i].cell->nbytes;
    }
    note_floor(fixed + pinned + scratch_peak());
  }

  void record(Frame& frame, const c10::IValue* args, size_t n) {
    if (info_->seeded) drawing_lock().lock();
    recipe_ = describe(info_, below_, args, n);
    if (info_->seeded && !(recipe_ && recipe_->rng.defined())) drawing_lock().unlock();
    if (!recipe_) return;
    counters.recorded_ops++;
    if (info_->writes == 0 || recipe_->kind->trust.load(std::memory_order_relaxed) != Trust::kNew) return;
    // The first of its kind that writes in place: what it is going to write to, for the second run.
    for (const TensorArg& a : recipe_->tensors)
      if (a.role == Role::kWritten && a.version->cell) {
        Cell* c = a.version->cell;
        before_ =
            c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(c->nbytes),
                                                  pool_allocate(c->nbytes), c10::GetAllocator(c10::kCPU), false);
        std::memcpy(pointer_of(before_.get()).get(), c->bytes.get(), c->nbytes);
      }
  }

  void outputs(Frame& frame, double seconds) {
    c10::SmallVector<c10::StorageImpl*, 4> storages;
    const size_t returns = op_.schema().returns().size();
    if (info_->kind == OpClass::kForeign && is_collective()) keep_until_done(frame, returns);
    if (info_->writes && recipe_) {
      attach_write(frame, seconds);
      // out= may have got memory of its own size
    }
    collect_outputs(*stack_, returns, &storages);
    std::vector<Version*> versions(storages.size(), nullptr);
    bool any = false;
    for (size_t i = 0; i < storages.size(); ++i) {
      if (!newly_large(storages[i])) continue;
      Cell* c = adopt(storages[i]);
      if (!c) continue;
      frame.add_pinned(c);
      versions[i] = c->version;
      any = true;
      if (info_->uninitialized) {
        std::lock_guard<std::mutex> lock(graph_lock());
        c->version->uninitialized = true;
        c->newborn = true;
        stand_pinned_locked(c);
      }
    }
    if (!recipe_) return;
    if (!any) {
      give_up();
      return;
    }
    note_seconds(recipe_->kind, seconds);
    for (size_t i = 0; i < storages.size(); ++i)
      if (!versions[i]) storages[i] = nullptr;
    try_kind({storages.begin(), storages.end()});
    if (recipe_->kind->trust.load(std::memory_order_relaxed) == Trust::kYes)
      attach(std::move(recipe_), versions);
    else
      give_up();
  }

  void attach_write(const Frame& frame, double seconds) {
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
    note_seconds(recipe_->kind, seconds);
    try_kind({s});
    if (recipe_->kind->trust.load(std::memory_order_relaxed) == Trust::kYes)
      attach(std::move(recipe_), {written->version});
    else
      give_up();
  }

  // Rule 8: twice at its first use, and compared.
  void try_kind(const std::vector<c10::StorageImpl*>& left) {
    Kind* kind = recipe_->kind;
    if (kind->trust.load(std::memory_order_relaxed) != Trust::kNew) return;
    for (const TensorArg& a : recipe_->tensors)
      if (a.role == Role::kWritten && !before_) return;
    if (kind->trials.load() >= 8) return;
    try {
      const uint64_t begun = ticks();
      const bool same = reproduces(*recipe_, left, std::move(before_));
      note_seconds(kind, seconds_of_ticks(ticks() - begun));
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
      Works& w = works();
      std::lock_guard<std::mutex> lock(w.lock);
      in_flight_bytes += frame.bytes();
      w.all.push_back({c10::weak_intrusive_ptr<c10::intrusive_ptr_target>(work), frame.hand_over()});
      w.count = w.all.size();
      return;
    }
  }

  const c10::OperatorHandle& op_;
  OpInfo* info_;
  c10::DispatchKeySet below_;
  torch::jit::Stack* stack_;
  std::unique_ptr<Recipe> recipe_;
  StoragePtr before_;
};

// The trap met by somebody inside the op who reads a tensor that no argument shows: it comes back, pinned.
bool bring_back_trapped(const char* what, Frame* frame) {
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
    frame->add_pinned(found);
  }
  bring_back(found);
  drop_later(std::move(storage));
  return true;
}

void ordinary(const c10::OperatorHandle& op, OpInfo* info, c10::DispatchKeySet below, torch::jit::Stack* stack) {
  Depth depth;
  std::optional<Admitted> admitted;  // ends after the pins
  Frame frame, extra;
  const size_t n = op.schema().arguments().size(), base = stack->size() - n;
  const c10::IValue* args = stack->data() + base;
  if (info->kind != OpClass::kMetadata) touch_arguments(frame, info, args, n);
  if (works().count.load(std::memory_order_relaxed)) poll_works();
  if (C10_LIKELY(frame.empty() && !frame.writes() && info->kind != OpClass::kForeign) &&
      !(info->recordable && c10::GradMode::is_enabled() && may_make_large(info, args, n))) {
    // Small tensors only, nothing of ours to change and nothing to note.
    const size_t returns = op.schema().returns().size();
    call_below(op, below, stack);
    adopt_outputs(info, *stack, returns);
    return;
  }
  const uint64_t need = frame.bytes() + info->scratch_bytes.load(std::memory_order_relaxed);
  bool alone = false;
  // Kept only where a second try may be needed: somebody's bytes are absent, or somebody else runs.
  c10::SmallVector<c10::IValue, 10> copy;
  const bool may_retry = absent_cells.load(std::memory_order_relaxed) > 0 || others_are_running();
  if (may_retry) copy.append(args, args + n);
  for (int attempt = 0;; ++attempt) {
    Call call(op, info, below, stack);
    try {
      if (tl_depth == 1) admitted.emplace(need, alone);
      call.run(frame);
      break;
    } catch (const c10::OutOfMemoryError&) {
      call.give_up();
      if (!may_retry || alone || tl_depth > 1 || call.began_writes || call.drew) throw;
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
    stack->resize(base);
    stack->insert(stack->end(), copy.begin(), copy.end());
    if (info->kind != OpClass::kMetadata) touch_arguments(frame, info, stack->data() + base, n);
  }
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
    extra.release();
    static std::atomic<int> turn{0};
    for (auto& [cell, held] : out) {
      if (cell_of(held.get()) == cell) let_go(cell, turn++);
      drop_later(std::move(held));
    }
  }
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
  if (C10_UNLIKELY(!budget.open.load(std::memory_order_acquire) || tl_regions > 0)) {
    call_below(op, below, stack);
    return;
  }
  OpInfo* info = info_of(op);
  counters.ops.fetch_add(1, std::memory_order_relaxed);
  switch (info->kind) {
    case OpClass::kView:
      call_below(op, below, stack);
      return;
    case OpClass::kComposite:
      op.redispatchBoxed(below, stack);
      return;
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
    ordinary(op, info, below, stack);
  } catch (const c10::OutOfMemoryError& e) {
    if (tl_depth == 0) raise_budget_error(e);
    throw;
  }
}

// ---- threads that are not seen ----

// The first op of a thread that we have not met, whose arguments nobody shows us (asking for them would cost every op
// of every thread 0.5 us): while it runs nothing leaves, all that was away is back, and all that it may have written to
// counts as written. From its next op on the thread is seen.
struct Unseen final : at::ObserverContext {
  Unseen() { nothing_leaves(true); }
  ~Unseen() override { nothing_leaves(false); }
};

std::vector<std::pair<Cell*, StoragePtr>> hold_all() {
  std::vector<std::pair<Cell*, StoragePtr>> held;
  std::lock_guard<std::mutex> lock(graph_lock());
  for_each_cell_locked([&](Cell* c) {
    if (c->storage._unsafe_get_target())
      if (StoragePtr s = hold(c)) held.emplace_back(c, std::move(s));
  });
  return held;
}

// Threads on which a backend runs its works: what it makes there is its own (rule 5).
bool is_backends_thread() {
  char name[16] = {};
  return pthread_getname_np(pthread_self(), name, sizeof name) == 0 &&
         (!strncmp(name, "pt_gloo", 7) || !strncmp(name, "pt_nccl", 7) || !strncmp(name, "pt_ucc", 6) ||
          !strncmp(name, "pt_mpi", 6));
}

std::unique_ptr<at::ObserverContext> unseen_op_begins(const at::RecordFunction&) {
  if (C10_LIKELY(thread_is_seen()) || tl_depth > 0 || tl_running_recipes > 0 || !budget.open.load()) return nullptr;
  if (at::in_parallel_region()) return nullptr;  // a piece of an op that is under way elsewhere
  static thread_local const bool backends = is_backends_thread();
  if (backends) return nullptr;
  see_this_thread(true);
  counters.unseen_ops++;
  Depth inside;
  auto unseen = std::make_unique<Unseen>();
  auto all = hold_all();
  try {
    for (auto& [c, s] : all) {
      pin(c, ticks());
      try {
        bring_back(c);
        settle_before_write(c);
        drop_slot(c);
        Trash trash;
        std::lock_guard<std::mutex> lock(graph_lock());
        new_version_locked(c, &trash);
      } catch (...) {
        unpin(c);
        throw;
      }
      unpin(c);
    }
  } catch (...) {
    // What finds no room stays away, and the trap says so if the op reads it: an observer's exception would be lost.
  }
  for (auto& [c, s] : all) drop_later(std::move(s));
  return unseen;
}

at::CallbackHandle net = at::INVALID_CALLBACK_HANDLE;

}  // namespace

bool others_are_running() { return admission().ops.load() > (tl_depth > 0 ? 1 : 0); }

void wait_for_others(double seconds) {
  Admission& a = admission();
  WithoutGil released;
  std::unique_lock<std::mutex> lock(a.lock);
  a.waiting++;
  a.changed.wait_for(lock, std::chrono::duration<double>(seconds));
  a.waiting--;
}

void foreign_write(c10::StorageImpl* s) {
  Cell* c = cell_of(s);
  // An op, a scoped reader or a region has it pinned, and has said what it writes; what escaped is written to at will.
  if (!c || !budget.open.load() || tl_depth > 0 || (c->state.load() & kPinMask)) return;
  counters.foreign_writes++;
  escape(c, Escape::kForeignWrite);
}

void enter_region() { ++tl_regions; }
void leave_region() { --tl_regions; }

void see_this_thread(bool on) { c10::impl::tls_set_dispatch_key_included(kKey, on); }

bool thread_is_seen() { return c10::impl::tls_is_dispatch_key_included(kKey); }

void catch_unseen_threads(bool on) {
  if (on && net == at::INVALID_CALLBACK_HANDLE) {
    net = at::addGlobalCallback(at::RecordFunctionCallback(&unseen_op_begins).scopes({at::RecordScope::FUNCTION}));
  } else if (!on && net != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(net);
    net = at::INVALID_CALLBACK_HANDLE;
  }
}

void escape(Cell* c, Escape why) {
  pin(c, ticks());
  try {
    bring_back(c);
    settle_before_write(c);  // whoever has the address may write there at any time
  } catch (...) {
    unpin(c);
    throw;
  }
  drop_slot(c);
  {
    Trash trash;
    std::lock_guard<std::mutex> lock(graph_lock());
    if (c->escape == Escape::kNone) {
      new_version_locked(c, &trash);
      c->escape = why;
      stand_pinned_locked(c);
      escaped_bytes += c->nbytes;
      counters.escapes++;
    }
  }
  unpin(c);
}

static void end_works(bool all) {
  std::vector<Cell*> done;
  {
    Works& w = works();
    std::lock_guard<std::mutex> lock(w.lock);
    for (auto it = w.all.begin(); it != w.all.end();) {
      if (!all && !it->work.expired()) {
        ++it;
        continue;
      }
      done.insert(done.end(), it->pinned.begin(), it->pinned.end());
      it = w.all.erase(it);
    }
    w.count = w.all.size();
  }
  for (Cell* c : done) {
    in_flight_bytes -= c->nbytes;
    unpin(c);
  }
}

void poll_works() { end_works(false); }
void forget_works() { end_works(true); }

size_t works_in_flight() { return works().count.load(); }

TORCH_LIBRARY_IMPL(_, Fake, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace memmgr::pager
