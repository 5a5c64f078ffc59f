#include "python/bind_plans.h"

// The Python module's functions for periods, plans and an optimizer's step. Columns go out, plan actions come in. No op
// calls them.

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <unordered_map>
#include <utility>

#include "base/gil.h"
#include "base/link.h"
#include "base/no_destructor.h"
#include "dispatch/the_session.h"
#include "ops/list_ops.h"
#include "ops/op_info.h"
#include "plan/follow.h"
#include "plan/loops.h"
#include "plan/op_in_timeline.h"
#include "plan/timeline.h"
#include "pools/stream_rules.h"
#include "python/bind.h"
#include "residency/transfer.h"

namespace memmgr::pager {

struct PeriodInfo {
  uint64_t hash, before, ops;
  bool followed, ran_short;
  uint64_t lacked_bytes, left_plan, left_at, trials;
  bool overflow;
};

FIELDS(PeriodInfo,
       "A period that ended. `hash`: of its ops. `before`: of the ops of the period before it, 0 if that was not "
       "recorded. `ran_short`: its plan left malloc to choose victims, or `lacked_bytes` of its blocks' places had no "
       "memory. `left_plan`: the hash of the plan that it left before its end, 0 for none. `left_at`: the first op "
       "that differs, from 0; the number of its ops if it ended first.",
       hash, before, ops, followed, ran_short, lacked_bytes, left_plan, left_at, trials, overflow)

struct TimelineColumns {
  std::vector<std::string> names;
  Column<int32_t> op;
  Column<uint32_t> first_touch;
  Column<float> seconds, before;
  Column<uint64_t> scratch, other;
  Column<uint32_t> module, ordinal;
  Column<uint8_t> flags;
  Column<uint32_t> bits, deaths;
  Column<uint64_t> sizes;
  Column<decltype(Timeline::fixed)::value_type> fixed;
  Column<decltype(Timeline::prior)::value_type> prior;
  Column<uint64_t> hashes;
  int64_t turn;
};

FIELDS(TimelineColumns, "A period in columns, as bytes; `allocator/pager/plan/timeline.h` explains them.", names, op,
       first_touch, seconds, before, scratch, other, module, ordinal, flags, bits, deaths, sizes, fixed, prior, hashes,
       turn)

FIELDS(Link, "The tier's rates as measured. The processor's is either way.", write_seconds_per_byte,
       read_seconds_per_byte, cpu_seconds_per_byte)

namespace {

// the GIL is held
NoDestructor<Timeline> last_timeline;

// Makes the period that ended the last timeline. Returns its figures.
PeriodInfo period_ended(Timeline ended, const Followed& followed) {
  *last_timeline = std::move(ended);
  const Timeline& t = *last_timeline;
  return {t.hash(),           t.before,
          t.ops.size(),       followed.to_the_end,
          followed.ran_short, followed.lacked_bytes,
          followed.left.plan, followed.left.position,
          t.trials,           t.overflow};
}

PeriodInfo py_next_period(bool noted) {
  Followed followed;
  Timeline ended;
  {
    const WithoutGil released;
    ended = next_period(the_session, noted);
    followed = end_following(the_session, ended.hash(), ended.before, ended.ops.size(),
                             std::max<uint64_t>(ended.backwards, 1));
    poll_transfers(the_session);
  }
  return period_ended(std::move(ended), followed);
}

bool py_wait_for_loop() {
  const WithoutGil released;
  return wait_for_loop();
}

std::optional<PeriodInfo> py_take_loop() {
  Followed followed;
  Timeline ended;
  if (!take_loop(&ended, &followed)) return std::nullopt;
  return period_ended(std::move(ended), followed);
}

void py_seek_loops(bool on) { seek_loops(the_session, on); }

void py_turn_period() {
  const WithoutGil released;
  turn_period(the_session);
}

TimelineColumns py_timeline() {
  if (last_timeline->points || (queues && !last_timeline->of_device)) {
    // The wait for the device is without the GIL. Another period may end during it, and is then the last one.
    Timeline timed = std::exchange(*last_timeline, Timeline());
    {
      const WithoutGil released;
      take_device_times(&timed);
    }
    if (last_timeline->ops.empty()) *last_timeline = std::move(timed);
  }
  const Timeline& t = *last_timeline;
  TimelineColumns columns;
  std::unordered_map<const OpInfo*, int32_t> numbers;
  for (const OpNote& op : t.ops) {
    const auto [at, fresh] = numbers.try_emplace(op.info, static_cast<int32_t>(numbers.size()));
    if (fresh) columns.names.push_back(op.info->name());
    columns.op.push_back(at->second);
    columns.first_touch.push_back(op.first_touch);
    columns.seconds.push_back(op.seconds);
    columns.before.push_back(op.before);
    columns.scratch.push_back(op.scratch);
    columns.other.push_back(op.other);
    columns.module.push_back(op.module);
  }
  for (const TouchNote& n : t.touches) {
    columns.ordinal.push_back(n.ordinal);
    columns.flags.push_back(n.flags);
    columns.bits.push_back(n.bits);
  }
  for (const auto& [at, ordinal] : t.deaths) {
    columns.deaths.push_back(at);
    columns.deaths.push_back(ordinal);
  }
  columns.sizes = t.sizes;
  columns.fixed = t.fixed;
  columns.prior = t.prior;
  columns.hashes = t.hashes;
  columns.turn = t.turn;
  return columns;
}

struct Rows {  // of int64
  const int64_t* data;
  size_t rows;
};

Rows rows_of(const Bytes& bytes, size_t width) {
  if (bytes.size() % (8 * width)) raise_error(PyExc_ValueError, "rows of int64, as bytes");
  return {reinterpret_cast<const int64_t*>(bytes.data()), bytes.size() / (8 * width)};
}

std::vector<PlanRow> plan_rows(const Bytes& bytes) {
  const Rows c = rows_of(bytes, 3);
  std::vector<PlanRow> rows;
  for (size_t i = 0; i < c.rows; ++i)
    rows.push_back({static_cast<uint32_t>(c.data[3 * i]), static_cast<uint32_t>(c.data[3 * i + 1]),
                    static_cast<Row>(std::clamp<int64_t>(c.data[3 * i + 2], 0, kValues<Row> - 1))});
  return rows;
}

// hashes: as timeline() returned them. The others: actions of int64, sorted by position: (position, ordinal, Row), and
// for kept (made, read, ordinal).
void py_add_plan(Bytes hashes, Bytes departures, Bytes writes, Bytes reads, Bytes groups, Bytes kept) {
  FollowedPlan plan;
  plan.departures = plan_rows(departures);
  plan.writes = plan_rows(writes);
  plan.reads = plan_rows(reads);
  plan.groups = plan_rows(groups);
  const Rows k = rows_of(kept, 3), h = rows_of(hashes, 1);
  for (size_t i = 0; i < k.rows; ++i)
    plan.kept.push_back({static_cast<uint32_t>(k.data[3 * i]), static_cast<uint32_t>(k.data[3 * i + 1]),
                         static_cast<uint32_t>(k.data[3 * i + 2])});
  if (h.rows == 0) raise_error(PyExc_ValueError, "a plan for no op");
  plan.hashes.resize(h.rows);
  std::memcpy(plan.hashes.data(), h.data, h.rows * 8);
  add_plan(the_session, std::move(plan));
}

// Not cut either if two indices share memory: each op of a step runs on all indices before the next op does.
std::vector<size_t> py_cuts(TensorLists lists) {
  std::vector<uint64_t> bytes;
  std::vector<InList> all;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(lists.object); ++i) {
    PyObject* one = Cast<List>::from(PyList_GET_ITEM(lists.object, i)).object;
    bytes.resize(std::max(bytes.size(), static_cast<size_t>(PyList_GET_SIZE(one))));
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(one); ++k)
      if (PyObject* o = PyList_GET_ITEM(one, k); THPVariable_Check(o)) {
        const at::Tensor& t = THPVariable_Unpack(o);
        bytes[static_cast<size_t>(k)] += bytes_in_list(the_session.options, t);
        all.push_back({t.unsafeGetTensorImpl(), static_cast<size_t>(k)});
      }
  }
  std::vector<size_t> where = cuts(the_session, bytes);
  if (!where.empty() && share_memory(all)) where.clear();
  return where;
}

}  // namespace

void bind_plans(Module& m) {
  m.def<&py_next_period>("next_period", "noted", "Ends a period. `timeline()` has its columns.");
  m.def<&py_seek_loops>("seek_loops", "on", "Whether turns of loops without a backward are periods.");
  m.def<&py_wait_for_loop>("wait_for_loop", "",
                           "Waits without the GIL until a turn of a loop needs a plan. False: the budget ends.");
  m.def<&end_wait_for_loop>("end_wait_for_loop", "", "Ends the wait for a loop.");
  m.def<&py_take_loop>("take_loop", "", "The turn that needs a plan; None: there is none.");
  m.def<&py_turn_period>("turn_period", "", "An outermost backward begins.");
  m.def<&py_timeline>("timeline", "", "The period that ended last.");
  m.def<&link>("link", "", "The tier's rates as measured.");
  m.def<&py_add_plan>("add_plan", "*, hashes, departures, writes, reads, groups, kept",
                      "A plan for periods with these hashes. The others: rows of three int64.");
  m.def<&py_cuts>("cuts", "lists",
                  "Where an optimizer's step on these lists is cut: the first index of each slice, and the end; empty: "
                  "it is not. Of tensors or None, all of one length.");
}

void forget_periods() {
  end_following(the_session);
  drop_plans(the_session);
  seek_loops(the_session, false);
  next_period(the_session, false);
  next_period(the_session, false);  // the last period must not be the one before any other
  *last_timeline = Timeline();
}

}  // namespace memmgr::pager
