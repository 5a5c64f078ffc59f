#include "python/bind_plans.h"

// The Python module's functions for periods, plans and an optimizer's step. Columns go out, plan actions come in. No op
// calls them.

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "base/errors.h"
#include "base/link.h"
#include "ops/list_ops.h"
#include "ops/op_info.h"
#include "plan/follow.h"
#include "plan/loops.h"
#include "plan/op_in_timeline.h"
#include "plan/timeline.h"
#include "residency/transfer.h"

namespace memmgr::pager {

namespace {

Timeline& last_timeline() {  // the GIL is held
  static auto* t = new Timeline;
  return *t;
}

bool set(PyObject* dict, const char* key, PyObject* value) {
  const bool done = value && PyDict_SetItemString(dict, key, value) == 0;
  Py_XDECREF(value);
  return done;
}

template <class T>
PyObject* bytes_of(const std::vector<T>& column) {
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(column.data()),
                                   static_cast<Py_ssize_t>(column.size() * sizeof(T)));
}

// Makes the period that ended the last timeline. Returns its figures.
PyObject* period_ended(Timeline ended, const Followed& followed) {
  last_timeline() = std::move(ended);
  const Timeline& t = last_timeline();
  return Py_BuildValue(
      "{sK sK sn sO sO sK sO sK sn}", "before", static_cast<unsigned long long>(t.before), "hash",
      static_cast<unsigned long long>(t.hash()), "ops", static_cast<Py_ssize_t>(t.ops.size()), "followed",
      followed.to_the_end ? Py_True : Py_False, "short", followed.ran_short ? Py_True : Py_False, "trials",
      static_cast<unsigned long long>(t.trials), "overflow", t.overflow ? Py_True : Py_False, "left_plan",
      static_cast<unsigned long long>(followed.left.plan), "left_at", static_cast<Py_ssize_t>(followed.left.position));
}

// next_period(noted) -> dict: figures of the period that ended. `timeline()` has its columns.
PyObject* py_next_period(PyObject*, PyObject* on) {
  const bool noted = PyObject_IsTrue(on) == 1;
  Followed followed;
  Timeline ended;
  std::exception_ptr wrong;
  Py_BEGIN_ALLOW_THREADS;
  try {
    ended = next_period(noted);
    followed = end_following(ended.hash(), ended.before, ended.ops.size(), std::max<uint64_t>(ended.backwards, 1));
    poll_transfers();
  } catch (...) {
    wrong = std::current_exception();
  }
  Py_END_ALLOW_THREADS;
  return guarded([&] {
    if (wrong) std::rethrow_exception(wrong);
    return period_ended(std::move(ended), followed);
  });
}

PyObject* py_seek_loops(PyObject*, PyObject* on) {
  seek_loops(PyObject_IsTrue(on) == 1);
  Py_RETURN_NONE;
}

// wait_for_loop(): waits without the GIL until a turn of a loop needs a plan. False: the budget ends.
PyObject* py_wait_for_loop(PyObject*, PyObject*) {
  bool turned;
  Py_BEGIN_ALLOW_THREADS;
  turned = wait_for_loop();
  Py_END_ALLOW_THREADS;
  return PyBool_FromLong(turned);
}

PyObject* py_end_wait_for_loop(PyObject*, PyObject*) {
  end_wait_for_loop();
  Py_RETURN_NONE;
}

// take_loop() -> as next_period(), for the turn that needs a plan; None: there is none
PyObject* py_take_loop(PyObject*, PyObject*) {
  Followed followed;
  Timeline ended;
  if (!take_loop(&ended, &followed)) Py_RETURN_NONE;
  return period_ended(std::move(ended), followed);
}

// turn_period(): called where an outermost backward begins
PyObject* py_turn_period(PyObject*, PyObject*) {
  Py_BEGIN_ALLOW_THREADS;
  turn_period();
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

// timeline() -> dict of columns as bytes, of the period that ended last
PyObject* py_timeline(PyObject*, PyObject*) {
  if (last_timeline().points) {
    // The wait for the device is without the GIL. Another period may end during it, and is then the last one.
    Timeline timed = std::exchange(last_timeline(), Timeline());
    Py_BEGIN_ALLOW_THREADS;
    take_device_times(&timed);
    Py_END_ALLOW_THREADS;
    if (last_timeline().ops.empty()) last_timeline() = std::move(timed);
  }
  const Timeline& t = last_timeline();
  std::vector<int32_t> names;
  std::vector<uint32_t> first, modules;
  std::vector<float> seconds, before;
  std::vector<uint64_t> scratch, other;
  std::unordered_map<const OpInfo*, int32_t> numbers;
  PyObject* list = PyList_New(0);
  if (!list) return nullptr;
  for (const OpNote& op : t.ops) {
    const auto [at, fresh] = numbers.try_emplace(op.info, static_cast<int32_t>(numbers.size()));
    if (fresh) {
      PyObject* text = PyUnicode_FromString(op.info->name().c_str());
      if (!text || PyList_Append(list, text) != 0) {
        Py_XDECREF(text);
        Py_DECREF(list);
        return nullptr;
      }
      Py_DECREF(text);
    }
    names.push_back(at->second);
    first.push_back(op.first_touch);
    seconds.push_back(op.seconds);
    before.push_back(op.before);
    scratch.push_back(op.scratch);
    other.push_back(op.other);
    modules.push_back(op.module);
  }
  std::vector<uint32_t> ordinals, deaths, bits;
  std::vector<uint8_t> flags;
  for (const TouchNote& n : t.touches) {
    ordinals.push_back(n.ordinal);
    flags.push_back(n.flags);
    bits.push_back(n.bits);
  }
  for (const auto& [at, ordinal] : t.deaths) {
    deaths.push_back(at);
    deaths.push_back(ordinal);
  }
  PyObject* d = PyDict_New();
  if (!d) {
    Py_DECREF(list);
    return nullptr;
  }
  const bool done = set(d, "names", list) && set(d, "op", bytes_of(names)) && set(d, "first_touch", bytes_of(first)) &&
                    set(d, "seconds", bytes_of(seconds)) && set(d, "before", bytes_of(before)) &&
                    set(d, "scratch", bytes_of(scratch)) && set(d, "other", bytes_of(other)) &&
                    set(d, "module", bytes_of(modules)) && set(d, "ordinal", bytes_of(ordinals)) &&
                    set(d, "flags", bytes_of(flags)) && set(d, "bits", bytes_of(bits)) &&
                    set(d, "deaths", bytes_of(deaths)) && set(d, "sizes", bytes_of(t.sizes)) &&
                    set(d, "fixed", bytes_of(t.fixed)) && set(d, "prior", bytes_of(t.prior)) &&
                    set(d, "hashes", bytes_of(t.hashes)) && set(d, "turn", PyLong_FromLongLong(t.turn));
  if (!done) Py_CLEAR(d);
  return d;
}

// link() -> seconds a byte, as measured: (write, read, processor time either way)
PyObject* py_link(PyObject*, PyObject*) {
  const Link now = link();
  return Py_BuildValue("(ddd)", now.write_seconds_per_byte, now.read_seconds_per_byte, now.cpu_seconds_per_byte);
}

struct Columns {  // rows of int64
  const int64_t* data = nullptr;
  size_t rows = 0;
};

bool take(PyObject* bytes, size_t width, Columns* out) {
  if (!PyBytes_Check(bytes) || static_cast<size_t>(PyBytes_GET_SIZE(bytes)) % (8 * width)) {
    PyErr_SetString(PyExc_ValueError, "rows of int64, as bytes");
    return false;
  }
  out->data = reinterpret_cast<const int64_t*>(PyBytes_AS_STRING(bytes));
  out->rows = static_cast<size_t>(PyBytes_GET_SIZE(bytes)) / (8 * width);
  return true;
}

std::vector<PlanRow> plan_rows(const Columns& c) {
  std::vector<PlanRow> rows;
  for (size_t i = 0; i < c.rows; ++i)
    rows.push_back({static_cast<uint32_t>(c.data[3 * i]), static_cast<uint32_t>(c.data[3 * i + 1]),
                    static_cast<Row>(std::clamp<int64_t>(c.data[3 * i + 2], 0, 3))});
  return rows;
}

// add_plan(hashes, departures, writes, reads, groups, kept). hashes: as timeline() returned them. The others: actions
// of int64, sorted by position: (position, ordinal, kind of action), and for kept (made, read, ordinal).
PyObject* py_add_plan(PyObject*, PyObject* args) {
  PyObject *hashes, *rows[4], *kept;
  if (!PyArg_ParseTuple(args, "SSSSSS", &hashes, &rows[0], &rows[1], &rows[2], &rows[3], &kept)) return nullptr;
  FollowedPlan plan;
  Columns c;
  std::vector<PlanRow>* into[] = {&plan.departures, &plan.writes, &plan.reads, &plan.groups};
  for (int i = 0; i < 4; ++i) {
    if (!take(rows[i], 3, &c)) return nullptr;
    *into[i] = plan_rows(c);
  }
  if (!take(kept, 3, &c)) return nullptr;
  for (size_t i = 0; i < c.rows; ++i)
    plan.kept.push_back({static_cast<uint32_t>(c.data[3 * i]), static_cast<uint32_t>(c.data[3 * i + 1]),
                         static_cast<uint32_t>(c.data[3 * i + 2])});
  if (!take(hashes, 1, &c)) return nullptr;
  if (c.rows == 0) {
    PyErr_SetString(PyExc_ValueError, "a plan for no op");
    return nullptr;
  }
  plan.hashes.resize(c.rows);
  std::memcpy(plan.hashes.data(), c.data, c.rows * 8);
  add_plan(std::move(plan));
  Py_RETURN_NONE;
}

// cuts(lists) -> [the first index of each slice, ..., the end]; []: the lists are not cut. lists: of tensors or None,
// all of one length. They are not cut either if two indices share memory: each op of a step runs on all indices before
// the next op does.
PyObject* py_cuts(PyObject*, PyObject* lists) {
  if (!PyList_Check(lists)) return PyErr_Format(PyExc_TypeError, "cuts() takes a list of lists");
  std::vector<uint64_t> bytes;
  std::vector<InList> all;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(lists); ++i) {
    PyObject* one = PyList_GET_ITEM(lists, i);
    if (!PyList_Check(one)) return PyErr_Format(PyExc_TypeError, "cuts() takes a list of lists");
    bytes.resize(std::max(bytes.size(), static_cast<size_t>(PyList_GET_SIZE(one))));
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(one); ++k)
      if (PyObject* o = PyList_GET_ITEM(one, k); THPVariable_Check(o)) {
        const at::Tensor& t = THPVariable_Unpack(o);
        bytes[static_cast<size_t>(k)] += bytes_in_list(t);
        all.push_back({t.unsafeGetTensorImpl(), static_cast<size_t>(k)});
      }
  }
  PyObject* found = PyList_New(0);
  std::vector<size_t> where = cuts(bytes);
  if (!where.empty() && share_memory(all)) where.clear();
  for (const size_t at : where) {
    PyObject* number = found ? PyLong_FromSize_t(at) : nullptr;
    if (!number || PyList_Append(found, number) < 0) Py_CLEAR(found);
    Py_XDECREF(number);
  }
  return found;
}

PyMethodDef plan_methods[] = {
    {"next_period", py_next_period, METH_O, "next_period(noted) -> figures of the period that ends here"},
    {"seek_loops", py_seek_loops, METH_O, "whether turns of loops without a backward are periods"},
    {"wait_for_loop", py_wait_for_loop, METH_NOARGS, "waits for a turn of a loop -> False: the budget ends"},
    {"end_wait_for_loop", py_end_wait_for_loop, METH_NOARGS, "whoever waits for a loop goes on"},
    {"take_loop", py_take_loop, METH_NOARGS, "take_loop() -> figures of the turn, None: it was taken"},
    {"turn_period", py_turn_period, METH_NOARGS, "an outermost backward begins"},
    {"timeline", py_timeline, METH_NOARGS, "columns of the period that ended last"},
    {"link", py_link, METH_NOARGS, "seconds a byte to the tier, back and of a CPU, as measured"},
    {"add_plan", py_add_plan, METH_VARARGS, "a plan for periods with these hashes"},
    {"cuts", py_cuts, METH_O, "cuts(lists): where an optimizer's step on these is cut"},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool add_plan_functions(PyObject* module) { return PyModule_AddFunctions(module, plan_methods) == 0; }

void forget_periods() {
  end_following();
  drop_plans();
  seek_loops(false);
  next_period(false);
  next_period(false);  // the last period must not be the one before any other
  last_timeline() = Timeline();
}

}  // namespace memmgr::pager
