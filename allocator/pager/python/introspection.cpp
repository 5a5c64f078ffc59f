#include "python/introspection.h"

#include <sys/mman.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <tuple>

#include "base/clock.h"
#include "base/events.h"
#include "base/lock.h"
#include "base/module_of_op.h"
#include "base/share.h"
#include "base/tensors.h"
#include "cells/births.h"
#include "cells/cell.h"
#include "cells/fixed_memory.h"
#include "cells/types.h"
#include "cells/version.h"
#include "concurrency/deferred_steps.h"
#include "dispatch/the_session.h"
#include "ops/op_info.h"
#include "plan/follow.h"
#include "pools/pool.h"
#include "recipes/op_signature.h"

namespace memmgr::pager {

struct EventRow {
  std::string what;
  std::optional<std::string> op;
  uint32_t module;
  uint64_t count, bytes;
  double seconds;
};

FIELDS(EventRow, "A sum of events. `what`: a word of Event. `op`: None if it is not known.", what, op, module, count,
       bytes, seconds)

struct EventList {
  std::vector<EventRow> sums;
  uint64_t unlisted;
};

FIELDS(EventList, "Events since the last call. `unlisted`: events that found no entry.", sums, unlisted)

// The keys are those of the stream.
struct WatchedCell {
  uint64_t bytes;
  std::string state;
  bool copy, fixed;
  uint32_t handles;
  double op_seconds, age_seconds;
  bool recomputable;
  std::optional<std::string> op;
  uint32_t module;
  uint64_t storage;
  uint32_t line;
};

FIELDS(
    WatchedCell,
    "A cell, as the stream has it. `state`: resident, evicted or offloaded. `copy`: in the tier. `fixed`: it cannot be "
    "evicted now. `handles`: references to its storage. `age_seconds`: since its last touch. `storage`: its address. "
    "`line`: the number of the source line that made it; 0: not recorded.",
    bytes, state, copy, fixed, handles, op_seconds, age_seconds, recomputable, op, module, storage, line)

struct ModuleShare {
  uint64_t resident = 0, fixed = 0, absent = 0;
};

FIELDS(ModuleShare, "Bytes of cells: resident, of these fixed, and absent.", resident, fixed, absent)

struct WatchedCells {
  std::vector<WatchedCell> cells;
  std::map<uint32_t, ModuleShare> modules;
};

FIELDS(WatchedCells, "The largest cells, the largest first, and the shares of the modules by number.", cells, modules)

struct MemoryMap {
  uint64_t span_bytes;
  std::vector<std::vector<int64_t>> columns;
};

FIELDS(MemoryMap,
       "The address space up to the last block that has memory. `columns`: bytes for each state, in the order of "
       "Stretch.",
       span_bytes, columns)

struct PassPeaks {
  uint64_t resident, unmanaged;
};

FIELDS(PassPeaks, "The high-water marks of a pass, in bytes: with memmgr, and as it would be without.", resident,
       unmanaged)

struct ResidentCell {
  uint64_t storage, bytes;
};

FIELDS(ResidentCell, "`storage`: its storage's address; 0: the storage has ended.", storage, bytes)

namespace {

std::optional<std::string> name_of(const OpInfo* info) {
  if (!info) return std::nullopt;
  if (!info->kernel.empty()) return info->kernel;
  std::string name = info->called.name;
  const size_t colons = name.find("::");
  if (colons != std::string::npos) name.replace(colons, 2, ".");
  const std::string& overload = info->called.overload_name;
  return name + "." + (overload.empty() ? "default" : overload);
}

const Recipe* maker_of(const Cell* c) REQUIRES(graph_lock()) { return c->version ? c->version->recipe : nullptr; }

// ---- the address space ----

struct Piece {
  uint64_t offset, bytes;
  Stretch state;
};
struct Strip {
  std::vector<std::pair<uint64_t, Stretch>> marks;  // offset of a block's start, and its state
  std::vector<Piece> pieces;
};

int add_piece(void* user, uint64_t offset, uint64_t bytes, int state) {
  auto* strip = static_cast<Strip*>(user);
  Stretch what = state == 1 ? Stretch::kFixed : state == 0 ? Stretch::kFree : Stretch::kHole;
  if (state == 1) {
    const auto it = std::lower_bound(strip->marks.begin(), strip->marks.end(), std::make_pair(offset, Stretch{}));
    if (it != strip->marks.end() && it->first < offset + bytes) what = it->second;
  }
  strip->pieces.push_back({offset, bytes, what});
  return 0;
}

bool is_fixed(const Cell* c) { return (c->state.load() & kPinMask) != 0 || c->escape != Escape::kNone; }

// ---- Python ----

void py_set_module(uint32_t number) { set_current_module(number); }

PassPeaks py_end_pass() {
  drop_unread_pending();
  end_pass_of_modules();
  end_pass_of_births();
  mm_arena_stats a{};
  if (the_session.arena) mm_arena_stats_get(the_session.arena, &a);
  if (the_session.arena) mm_arena_reset_peak(the_session.arena);
  return {a.resident_peak_bytes, a.unmanaged_peak_bytes};
}

EventList py_drain_events() {
  const EventSums taken = take_events();
  EventList events{{}, taken.unlisted};
  for (const auto& [key, sum] : taken.sums)
    events.sums.push_back({word_of(static_cast<Event>(std::get<0>(key))), name_of(std::get<1>(key)), std::get<2>(key),
                           sum.count, sum.bytes, static_cast<double>(sum.ns) * 1e-9});
  return events;
}

WatchedCells py_watch_cells(uint32_t limit) {
  struct Row {
    uint64_t bytes;
    const char* state;
    bool copy, fixed, again;
    uint32_t references;
    double cost, age;
    const OpInfo* op;
    uint32_t module;
    uint64_t storage;
    uint32_t line;
  };
  std::vector<Row> rows;
  WatchedCells watched_cells;
  const uint64_t now = ticks();
  {
    const Hold lock(graph_lock());
    for_each_cell_locked([&](Cell* c) REQUIRES(graph_lock()) {
      if (c->small) return;
      const bool absent = c->state.load() & kAbsent, fixed = !absent && is_fixed(c);
      const Recipe* r = maker_of(c);
      const Origin origin = origin_of_locked(c);
      ModuleShare& share = watched_cells.modules[origin.module];
      (absent ? share.absent : share.resident) += c->nbytes;
      if (fixed) share.fixed += c->nbytes;
      const uint64_t touched = c->last_touch.load(std::memory_order_relaxed);
      rows.push_back({c->nbytes,
                      !absent                             ? "resident"
                      : c->absence == Absence::kOffloaded ? "offloaded"
                                                          : "evicted",
                      c->slot >= 0, fixed, r && recipe_available_locked(r) && the_session.options.may_evict,
                      c->storage.use_count(), r ? seconds_of(r) : 0,
                      seconds_of_ticks(now > touched ? now - touched : 0), origin.op, origin.module,
                      reinterpret_cast<uintptr_t>(c->storage._unsafe_get_target()), c->birth.line});
    });
  }
  const size_t n = std::min(rows.size(), static_cast<size_t>(limit));
  std::partial_sort(rows.begin(), rows.begin() + static_cast<ptrdiff_t>(n), rows.end(),
                    [](const Row& a, const Row& b) { return a.bytes > b.bytes; });
  for (size_t i = 0; i < n; ++i) {
    const Row& r = rows[i];
    watched_cells.cells.push_back({r.bytes, r.state, r.copy, r.fixed, r.references, r.cost, r.age, r.again,
                                   name_of(r.op), r.module, r.storage, r.line});
  }
  return watched_cells;
}

MemoryMap py_memory_map(uint32_t columns) {
  if (columns < 1 || columns > 4096) raise_error(PyExc_ValueError, "1 to 4096 columns");
  Strip strip;
  if (the_session.arena) {
    const auto* base = static_cast<const char*>(mm_arena_base(the_session.arena));
    {
      const Hold lock(graph_lock());
      for_each_cell_locked([&](Cell* c) REQUIRES(graph_lock()) {
        const void* p = block_of(c);
        if (c->small || !c->resident() || !p || !mm_arena_owns(the_session.arena, p)) return;
        const Stretch what = is_fixed(c)                         ? Stretch::kFixed
                             : c->queued_at >= 0 || c->slot >= 0 ? Stretch::kLeaving
                                                                 : Stretch::kEvictable;
        strip.marks.emplace_back(static_cast<uint64_t>(static_cast<const char*>(p) - base), what);
      });
    }
    std::sort(strip.marks.begin(), strip.marks.end());
    mm_arena_walk(the_session.arena, &add_piece, &strip);
  }
  // There are plenty of addresses: long stretches without memory would make the rest invisible.
  uint64_t live = 0, span = 0;
  for (const Piece& piece : strip.pieces)
    if (piece.state != Stretch::kHole) live += piece.bytes;
  while (!strip.pieces.empty() && strip.pieces.back().state == Stretch::kHole) strip.pieces.pop_back();
  for (Piece& piece : strip.pieces) {
    if (piece.state == Stretch::kHole) piece.bytes = std::min(piece.bytes, live / 64);
    span += piece.bytes;
  }
  std::vector<std::array<double, kValues<Stretch>>> sums(columns);
  const double width = std::max(1.0, static_cast<double>(span) / static_cast<double>(columns));
  double at = 0;
  for (const Piece& piece : strip.pieces) {
    const double end = at + static_cast<double>(piece.bytes);
    for (auto i = static_cast<size_t>(at / width); i < sums.size() && static_cast<double>(i) * width < end; ++i)
      sums[i][static_cast<size_t>(piece.state)] += std::max(
          0.0, std::min(end, static_cast<double>(i + 1) * width) - std::max(at, static_cast<double>(i) * width));
    at = end;
  }
  MemoryMap map{span, {}};
  for (const auto& sum : sums) map.columns.emplace_back(sum.begin(), sum.end());
  return map;
}

std::optional<StorageInfo> py_storage_info(Tensor o) {
  if (!THPVariable_Check(o.object)) return std::nullopt;
  return info_of_storage(THPVariable_Unpack(o.object));
}

std::vector<ResidentCell> py_resident_cells() {
  std::vector<ResidentCell> found;
  const Hold lock(graph_lock());
  for_each_cell_locked([&](Cell* c) REQUIRES(graph_lock()) {
    if (!c->small && c->resident())
      found.push_back({reinterpret_cast<uintptr_t>(c->storage._unsafe_get_target()), c->nbytes});
  });
  return found;
}

std::vector<std::string> py_written_arguments(const std::string& op, const std::string& overload) {
  const c10::OperatorHandle handle = c10::Dispatcher::singleton().findSchemaOrThrow(op.c_str(), overload.c_str());
  const OpInfo* info = info_of(handle);
  std::vector<std::string> names;
  for (size_t i = 0; i < info->arguments; ++i) {
    const bool statistic = static_cast<int>(i) == info->running_mean || static_cast<int>(i) == info->running_var;
    if (info->written[i] || statistic) names.push_back(handle.schema().arguments()[i].name());
  }
  return names;
}

}  // namespace

std::optional<StorageInfo> info_of_storage(const at::Tensor& t) {
  // The storage of a functional tensor has no memory, and its size may be a symbol, which has no number.
  if (!t.defined() || t.key_set().has(c10::DispatchKey::Functionalize)) return std::nullopt;
  if (!t.unsafeGetTensorImpl()->has_storage() || !the_session.pool ||
      t.device().type() != the_session.pool->device.type() ||
      (!t.device().is_cpu() && t.device().index() != the_session.pool->device.index()))
    return std::nullopt;
  c10::StorageImpl* s = t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  if (s->sym_nbytes().is_heap_allocated()) return std::nullopt;  // of a trace: it has no bytes
  const Cell* c = cell_of(s);
  const bool absent = c && (c->state.load() & kAbsent);
  const at::DataPtr& p = pointer_of(s);
  const bool counted =
      absent || (c && c->outside) || is_counted_as_fixed(s) || (p.get() && the_session.pool->counts(p));
  return StorageInfo{reinterpret_cast<uintptr_t>(s), absent ? 0 : s->nbytes(), s->nbytes(), counted};
}

void bind_introspection(Module& m) {
  m.def<&watch_events>("set_detail", "on", "Whether events are recorded by op and module.");
  m.def<&learn_modules>("set_learning", "on", "Whether set_module is called for every module.");
  m.def<&py_set_module>("set_module", "number", "The module whose forward runs in this thread.");
  m.def<&take_mispredicted>("ops_astray", "", "Ops since the last call whose module is not known.");
  m.def<&py_end_pass>("end_pass", "", "Ends a pass in this thread.");
  m.def<&py_drain_events>("drain_events", "", "Takes the events.");
  m.def<&py_watch_cells>("watch_cells", "limit", "Describes the largest cells, and sums over all by module.");
  m.def<&py_memory_map>("memory_map", "columns", "Describes the address space.");
  m.def<&py_storage_info>("storage_info", "tensor", "None: it has no storage on the device.");
  m.def<&py_written_arguments>("written_arguments", "op, overload",
                               "The arguments that a call of this op may write, by the pager's tables.");
  m.def<&py_resident_cells>("resident_cells", "", "The resident cells that are not small.");
}

}  // namespace memmgr::pager
