#include "remat/rematerialize.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <thread>
#include <unordered_map>
#include <unordered_set>

#include "base/clock.h"
#include "base/deferred_drop.h"
#include "base/events.h"
#include "base/lock.h"
#include "base/no_destructor.h"
#include "base/wait.h"
#include "cells/cell.h"
#include "cells/lifetime.h"
#include "cells/version.h"
#include "pools/pool.h"
#include "pools/scratch.h"
#include "recipes/op_signature.h"
#include "remat/replay.h"
#include "residency/checksums.h"
#include "residency/evict.h"
#include "residency/reclaim.h"
#include "residency/restore.h"

namespace memmgr::pager {

namespace {

struct Kept {
  Version* version;  // counted
  // The position of the group that reads it last; UINT32_MAX: the group that made it has reads to come.
  uint32_t until;
};

// Kept intermediates: ghosts whose bytes are kept after the rematerialization that made them, for other cells of its
// group or of later ones.
NoDestructor<std::vector<Kept>> kept_ghosts OF_GRAPH;

thread_local RematGroup* tl_group = nullptr;  // the group that this thread runs

bool is_read_later_locked(const Version* v) REQUIRES(graph_lock()) {
  if (!tl_group) return false;
  // The plan may keep a ghost that no cell needs yet: a cell that is made of it is evicted later, and made again then.
  return (v->needed > 0 && tl_group->reads_later_locked(v)) || tl_group->may_keep_locked(v);
}

bool worth_keeping_locked(const Version* v) REQUIRES(graph_lock()) { return v->temporary && is_read_later_locked(v); }

template <class Which>
uint64_t end_kept_locked(Trash* trash, Which&& which) REQUIRES(graph_lock()) {
  uint64_t bytes = 0;
  auto& all = *kept_ghosts;
  for (size_t i = all.size(); i-- > 0;) {
    if (!which(all[i])) continue;
    Version* v = all[i].version;
    all.erase(all.begin() + static_cast<std::ptrdiff_t>(i));
    if (v->cell && v->cell->state.load() == 0) bytes += v->nbytes;
    v->kept = false;
    end_loan_locked(v, trash);
    release_version_locked(v, trash);
  }
  return bytes;
}

// The recipes that have to run, in order, with a reference on each, and the ghosts that they make for one another.
struct RunOrder {
  std::vector<Recipe*> order;
  std::unordered_map<const Version*, uint32_t> uses;  // by version that these runs make: later runs that read it
  std::vector<Version*> lent;                         // counted
  bool beside_others = false;                         // an input may be made while the op's other inputs are pinned

  ~RunOrder() {
    Trash trash;
    const Hold lock(graph_lock());
    for (Version* v : lent) {
      if (worth_keeping_locked(v)) {
        v->kept = true;
        kept_ghosts->push_back({v, UINT32_MAX});
        continue;
      }
      end_loan_locked(v, &trash);
      release_version_locked(v, &trash);
    }
    for (Recipe* r : order) release_recipe_locked(r, &trash);
  }
};

// Depth first, without recursion: chains may be long.
void make_order_locked(Version* target, RunOrder* plan, std::unordered_set<const Recipe*>* seen)
    REQUIRES(graph_lock()) {
  struct At {
    Recipe* recipe;
    size_t next;
  };
  if (!seen->insert(target->recipe).second) return;
  std::vector<At> path{{target->recipe, 0}};
  while (!path.empty()) {
    At& at = path.back();
    if (at.next == at.recipe->tensors.size()) {
      at.recipe->refs++;
      plan->order.push_back(at.recipe);
      path.pop_back();
      continue;
    }
    const Version* v = at.recipe->tensors[at.next++].version;
    if (!v || has_bytes_locked(v)) continue;
    if (v->kept && v->cell) {
      plan->uses[v]++;
      continue;
    }
    // Input makes its bytes in other memory than the storage's.
    if (v->cell && only_python_has(v->cell->storage)) continue;
    TORCH_CHECK(v->recipe,
                "memmgr: a tensor cannot be made again because what it was made of is gone. Please report this.");
    plan->uses[v]++;
    if (seen->insert(v->recipe).second) path.push_back({v->recipe, 0});
  }
}

// The bytes of one argument, pinned while the op runs.
class Input {
 public:
  Input() = default;
  Input(Input&&) = delete;
  ~Input() {
    if (pinned_) unpin(pinned_);
    if (storage_) drop(std::move(storage_));
  }
  bool has_still_locked(const Version* v) const REQUIRES(graph_lock()) { return aside_.get() || v->cell == pinned_; }
  // Pins the input and restores it. False: the plan is out of date, since the bytes have ended or were evicted. An
  // evicted input would be made while the op's other inputs are pinned, which takes more room than the op needs. The
  // next plan makes it first, and the tier keeps its bytes until the op runs. Where the tier has no room the input
  // would be evicted again and again: beside_others makes it at once.
  bool fetch(const Version* v, Source* source, bool beside_others) {
    bool aside = false;
    for (;; std::this_thread::yield()) {
      const Hold lock(graph_lock());
      Cell* c = v->cell;
      if (!c) return false;
      if (!pin_living_locked(c, ticks())) continue;
      const bool orphan = !c->storage._unsafe_get_target();
      pinned_ = c;
      if (!orphan) storage_ = hold(c);
      aside = !orphan && !storage_ && !c->resident();
      if (v->evicted && c->slot < 0 && c->pool->session.may_offload() && !beside_others && !aside) return false;
      break;
    }
    if (aside && begin_restore(pinned_)) {
      read_aside();
      source->data = aside_.get();
      return true;
    }
    restore_cell(pinned_);
    source->data = pinned_->bytes.get();
    return true;
  }

 private:
  // Only a Python object has the storage, so its pointer is not changed (rule 11). The bytes are made in other memory.
  void read_aside() {
    const OwnWork own;
    try {
      Absence absence = pinned_->absence;
      const bool evicted = absence == Absence::kEvicted && pinned_->slot < 0;
      aside_ = evicted ? rematerialize(pinned_) : copy_back(pinned_, &absence);
      check_sum(pinned_, aside_.get());
    } catch (...) {
      end_move(pinned_, true);
      throw;
    }
    end_move(pinned_, true);
  }

  Cell* pinned_ = nullptr;
  StoragePtr storage_;
  at::DataPtr aside_;
};

// Gives a result to its evicted cell, if no other thread has that busy. True: the cell is resident.
bool give_to_cell(Version* v, StoragePtr& made) {
  bool last;
  StoragePtr storage;
  Cell* c;
  {
    const Hold lock(graph_lock());
    c = v->cell;
    if (!c || !v->evicted || c->version != v) return false;
    uint32_t state = c->state.load();
    if ((state & (kBusy | kDead)) || !(state & kAbsent)) return false;
    if (!c->state.compare_exchange_strong(state, state | kBusy)) return false;
    storage = hold(c);
    if (!storage && !end_move_locked(c, true)) return false;
  }
  if (!storage) {  // the storage has ended
    last_user_is_gone(c);
    return false;
  }
  try {
    check_restored(c, pointer_of(made.get()).get());
  } catch (...) {
    end_move(c, true);
    drop(std::move(storage));
    throw;
  }
  {
    Trash trash;
    const Hold lock(graph_lock());
    at::DataPtr& p = pointer_of(made.get());
    c->last_touch.store(ticks(), std::memory_order_relaxed);
    last = become_resident_locked(c, std::move(p), c->pool->stream(), &trash);
    p.clear();
  }
  made.reset();
  if (last) last_user_is_gone(c);
  drop(std::move(storage));
  return true;
}

// A reference to a version; null: none.
struct CountedVersion {
  explicit CountedVersion(Version* v) : version(v) {}
  ~CountedVersion() {
    if (!version) return;
    Trash trash;
    const Hold lock(graph_lock());
    release_version_locked(version, &trash);
  }
  Version* version;
};

// Brings a recipe's inputs back and runs it. False: bytes that the plan counted on have been evicted.
bool run_on_inputs(Pool& pool, const Recipe* r, const RunOrder& plan, std::vector<StoragePtr>* made) {
  std::vector<Source> sources(r->tensors.size());
  std::vector<std::unique_ptr<Input>> inputs;
  std::vector<const Version*> read;
  for (size_t i = 0; i < r->tensors.size(); ++i) {
    const Version* v = r->tensors[i].version;
    if (!v) continue;
    inputs.push_back(std::make_unique<Input>());
    if (!inputs.back()->fetch(v, &sources[i], plan.beside_others)) return false;
    read.push_back(v);
  }
  Wait wait;
  *made = run(pool, *r, std::move(sources));
  const uint64_t took = wait.end();
  Counters& counters = pool.session.counters;
  counters.rematerialized_ops++;
  counters.remat_ns += took;
  uint64_t bytes = 0;
  for (const StoragePtr& s : *made)
    if (s) bytes += s->nbytes();
  note_event(Event::kRematerialize, r, bytes, took);
  // Pins do not keep another thread's op from writing to an input. The old bytes have then moved to an orphan, and the
  // results may be wrong: they are dropped.
  const Hold lock(graph_lock());
  for (size_t i = 0; i < inputs.size(); ++i)
    if (!inputs[i]->has_still_locked(read[i])) return false;
  return true;
}

// Ends the loans of inputs that no later recipe of the plan reads.
void end_loans(const Recipe* r, RunOrder* plan) {
  Trash trash;
  const Hold lock(graph_lock());
  if (tl_group) tl_group->has_run_locked(r);
  for (const TensorArg& a : r->tensors) {
    const auto found = a.version ? plan->uses.find(a.version) : plan->uses.end();
    if (found == plan->uses.end() || found->second == 0 || --found->second > 0) continue;
    if (!worth_keeping_locked(a.version) &&
        std::find(plan->lent.begin(), plan->lent.end(), a.version) != plan->lent.end())
      end_loan_locked(a.version, &trash);
  }
}

// Gives the bytes of one output to the result, to the output's cell, or to a later recipe of the plan or of the group:
// an op with several outputs (a dropout's result and its mask) runs once for all of them.
void hand_out(Pool& pool, const Recipe* r, Version* v, StoragePtr& made, const Version* target, RunOrder* plan,
              at::DataPtr* result) {
  TORCH_CHECK(made->nbytes() == v->nbytes, "memmgr: ", r->info->name(),
              " gave another size when it was run again. Please report this.");
  const bool simple = pointer_of(made.get()).get_deleter() == pool.deleter();
  TORCH_CHECK(simple, "memmgr: ", r->info->name(), " gave memory that is not the pool's. Please report this.");
  if (v == target) {
    if (plan->uses[v] > 0) return;
    *result = std::move(pointer_of(made.get()));
    pointer_of(made.get()).clear();
    return;
  }
  if (give_to_cell(v, made)) return;
  const Hold lock(graph_lock());
  if (plan->uses[v] == 0 && !is_read_later_locked(v)) return;
  if (v->cell || v->refs == 1) return;  // no other reference is left
  lend_bytes_locked(pool, v, std::move(pointer_of(made.get())));
  pointer_of(made.get()).clear();
  v->refs++;
  plan->lent.push_back(v);
}

// Runs one recipe. False: bytes that the plan counted on have been evicted.
bool run_one(Pool& pool, const Recipe* r, const Version* target, RunOrder* plan, at::DataPtr* result) {
  std::vector<StoragePtr> made;
  if (!run_on_inputs(pool, r, *plan, &made)) return false;
  end_loans(r, plan);
  for (size_t i = 0; i < made.size(); ++i) {
    Version* v;
    {
      const Hold lock(graph_lock());
      v = i < r->outputs.size() ? r->outputs[i] : nullptr;
      if (v) v->refs++;
    }
    const CountedVersion counted(v);
    if (v && made[i]) hand_out(pool, r, v, made[i], target, plan, result);
  }
  return true;
}

}  // namespace

at::DataPtr rematerialize(Cell* c) {
  constexpr int kPatience = 50;  // attempts that fail because other threads evict the results of this one
  Counters& counters = c->pool->session.counters;
  counters.rematerializations++;
  const uint64_t tier_errors = counters.tier_errors;
  for (int attempt = 0; attempt < 1000; ++attempt) {
    std::optional<NothingIsDropped> kept;
    // Restored inputs are offloaded and not evicted, so that the next attempt has them.
    if (attempt > 0) kept.emplace();
    RunOrder plan;
    plan.beside_others = attempt > 0 && (counters.tier_errors != tier_errors || attempt > kPatience);
    const Version* target;
    {
      const Hold lock(graph_lock());
      target = c->version;
      TORCH_CHECK(target && target->recipe, "memmgr: an evicted tensor has lost its recipe. Please report this.");
      std::unordered_set<const Recipe*> seen;
      make_order_locked(c->version, &plan, &seen);
    }
    at::DataPtr result;
    bool done = true;
    for (size_t i = 0; i < plan.order.size() && done; ++i)
      done = run_one(*c->pool, plan.order[i], target, &plan, &result);
    if (done && result.get()) return result;
  }
  TORCH_CHECK(false, "memmgr: a tensor cannot be made again: what it is made of leaves as fast as it comes back");
}

RematGroup::RematGroup(const GroupPlan& plan, const std::vector<uint32_t>& ordinals, uint32_t position,
                       std::vector<KeptRow> keep)
    : plan_(plan), position_(position), keep_(std::move(keep)) {
  {
    RunOrder all;
    const Hold lock(graph_lock());
    std::unordered_set<const Recipe*> seen;
    for (const uint32_t ordinal : ordinals)
      if (Cell* c = plan_.cell_of(ordinal); c && c->version && c->version->evicted && c->version->recipe)
        make_order_locked(c->version, &all, &seen);
    for (const auto& [version, uses] : all.uses) reads_[version] = uses;
  }
  tl_group = this;
}

bool RematGroup::reads_later_locked(const Version* v) const {
  const auto found = reads_.find(v);
  return found != reads_.end() && found->second > 0;
}

std::vector<KeptRow>::iterator RematGroup::row_for(const Version* v) {
  return std::find_if(keep_.begin(), keep_.end(), [&](const KeptRow& r) { return plan_.was(v, r.ordinal); });
}

bool RematGroup::may_keep_locked(const Version* v) { return row_for(v) != keep_.end(); }

void RematGroup::has_run_locked(const Recipe* r) {
  for (const TensorArg& a : r->tensors) {
    const auto found = a.version ? reads_.find(a.version) : reads_.end();
    if (found != reads_.end() && found->second > 0) found->second--;
  }
  plan_.has_been_read(r);
}

void RematGroup::end_read() {
  Trash trash;
  const Hold lock(graph_lock());
  for (Kept& k : *kept_ghosts) {
    if (k.until != UINT32_MAX || reads_later_locked(k.version)) continue;
    const auto row = row_for(k.version);
    k.until = row != keep_.end() ? row->read : 0;
    if (row != keep_.end()) keep_.erase(row);
  }
  end_kept_locked(&trash, [&](const Kept& k) REQUIRES(graph_lock()) {
    return k.until <= position_ && !reads_later_locked(k.version);
  });
}

RematGroup::~RematGroup() {
  tl_group = nullptr;
  reads_.clear();
  end_read();
}

static const bool sets_rematerializer = (rematerializer = &rematerialize, room_sources.kept = &end_kept_ghosts, true);

uint64_t end_kept_ghosts() {
  Trash trash;
  const Hold lock(graph_lock());
  return end_kept_locked(&trash, [](const Kept&) { return true; });
}

std::vector<StoragePtr> run_over_inputs(Pool& pool, const Recipe& r, std::vector<StoragePtr>& before, int fill) {
  std::vector<Source> sources(r.tensors.size());
  std::vector<std::unique_ptr<Input>> inputs;
  size_t copies = 0;
  for (size_t i = 0; i < r.tensors.size(); ++i) {
    const TensorArg& a = r.tensors[i];
    if (!a.version) continue;
    if (a.role == ArgumentRole::kWritten) {
      StoragePtr& old = before[copies++];
      if (r.info->writes)  // there is no other run
        sources[i].own = std::move(old);
      else
        sources[i].data = pointer_of(old.get()).get();
      continue;
    }
    inputs.push_back(std::make_unique<Input>());
    if (!inputs.back()->fetch(a.version, &sources[i], true)) return {};
  }
  // The streams are settled so that the time is this run's: of all queued work only its own stream's comes before it.
  pool.settle_stream();
  const uint64_t begun = ticks();
  const Filling filling(fill);
  std::vector<StoragePtr> made = run(pool, r, std::move(sources));
  pool.settle_stream();
  // On a device a fill may take as long as the op.
  if (fill < 0 || pool.on_host()) note_seconds(r.kind, seconds_of_ticks(ticks() - begun));
  return made;
}

}  // namespace memmgr::pager
