#include "concurrency/python_threads.h"

#include <Python.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/gil.h"
#include "base/kernel_slots.h"
#include "base/lock.h"
#include "base/no_destructor.h"
#include "cells/freeze.h"
#include "pools/pool.h"

namespace memmgr::pager {

namespace {

struct Owned {
  PyObject* object;
  explicit Owned(PyObject* o) : object(o) {
    if (!o) PyErr_Clear();
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() { Py_XDECREF(object); }
};

std::string_view text_of(PyObject* o) {
  const char* text = o && PyUnicode_Check(o) ? PyUnicode_AsUTF8(o) : nullptr;
  if (!text) PyErr_Clear();
  return text ? text : "";
}

// Returns the module of the function that runs in the frame.
std::string module_of(PyObject* frame) {
  const Owned globals(PyObject_GetAttrString(frame, "f_globals"));
  const bool known = globals.object && PyDict_Check(globals.object);
  return std::string(text_of(known ? PyDict_GetItemString(globals.object, "__name__") : nullptr));
}

// Code objects of functions. They are never released. The GIL is held.
struct Codes {
  std::unordered_set<const void*> that_sleep, that_set_gradients;
};

NoDestructor<Codes> codes;

void add_code(PyObject* function, std::unordered_set<const void*>* codes) {
  if (PyMethod_Check(function)) function = PyMethod_GET_FUNCTION(function);
  if (PyFunction_Check(function) && codes->insert(PyFunction_GET_CODE(function)).second)
    Py_INCREF(PyFunction_GET_CODE(function));
}

// `p.grad = None` is an instruction of a function that names "grad"; setattr(p, name, None) one that names setattr.
bool may_set_gradients(PyCodeObject* code) {
  const Owned names(PyObject_GetAttrString(reinterpret_cast<PyObject*>(code), "co_names"));
  for (Py_ssize_t i = 0; names.object && i < PyTuple_GET_SIZE(names.object); ++i) {
    const std::string_view name = text_of(PyTuple_GET_ITEM(names.object, i));
    if (name == "grad" || name == "setattr" || name == "delattr" || name == "__setattr__" || name == "__delattr__")
      return true;
  }
  return false;
}

Elsewhere does(PyFrameObject* top) {
  Elsewhere found = Elsewhere::kRuns;
  Py_INCREF(top);
  for (PyFrameObject* frame = top; frame;) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    if (frame == top && codes->that_sleep.count(code)) found = Elsewhere::kWaits;
    // A backward also waits: for the engine's threads, for its peers, for a lock of the user's.
    if (codes->that_set_gradients.count(code) || (frame == top && may_set_gradients(code)))
      found = Elsewhere::kGradients;
    Py_DECREF(code);
    PyFrameObject* next = found == Elsewhere::kGradients ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = next;
  }
  return found;
}

// Visits each Python thread except this one. False: they could not be listed.
template <class F>
bool each_other_thread(const F& visit) {
  PyThreadState* const mine = PyThreadState_Get();
  PyThreadState* const first = PyInterpreterState_ThreadHead(PyThreadState_GetInterpreter(mine));
  if (first == mine && !PyThreadState_Next(first)) return true;
  const NoCollection meanwhile;
  const Owned frames(PyObject_CallNoArgs(PySys_GetObject("_current_frames")));
  PyObject *thread, *top;
  for (Py_ssize_t at = 0; frames.object && PyDict_Next(frames.object, &at, &thread, &top);)
    if (const unsigned long id = PyLong_AsUnsignedLong(thread); id != mine->thread_id)
      visit(id, reinterpret_cast<PyFrameObject*>(top));
  return frames.object != nullptr;
}

// A thread that has not been seen to go on since the budget opened.
struct Other {
  unsigned long thread;
  Sleeper sleeper;
  const void* frame;
  int instruction;
  uint64_t ops;
};

struct Others {
  Lock& lock = lock_of(LockId::kOtherThreads);
  std::vector<Other> all GUARDED_BY(lock);
  uint64_t until_ns GUARDED_BY(lock) = 0;  // later no thread is waited for: one that has not gone on runs no op
  Pool* pool GUARDED_BY(lock) = nullptr;
};

NoDestructor<Others> others;

std::atomic<bool> waiting_for_others{false};

template <class F>
void remove_locked(const F& has_ended) REQUIRES(others->lock) {
  auto& all = others->all;
  all.erase(std::remove_if(all.begin(), all.end(), has_ended), all.end());
}

void end_freeze_locked() REQUIRES(others->lock) {
  if (others->all.empty() && waiting_for_others.exchange(false)) freeze_all_evictions(false);
}

// Waits until the device has run all queued work. False: another thread's capture, for example, forbids that now.
bool settled(Pool* pool) {
  try {
    pool->settle();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// Returns the system's record of a thread; empty: it has ended.
std::string_view read_of_thread(unsigned long system_thread, const char* what, char* text, size_t size) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/self/task/%lu/%s", system_thread, what);
  FILE* file = std::fopen(path, "re");
  const size_t n = file ? std::fread(text, 1, size, file) : 0;
  if (file) std::fclose(file);
  return {text, n};
}

}  // namespace

void sleeps_in(PyObject* function) { add_code(function, &codes->that_sleep); }
void sets_gradients_in(PyObject* function) { add_code(function, &codes->that_set_gradients); }

bool rests(Sleeper* o, uint64_t now, uint64_t long_ns) {
  char text[512], times[64];
  const std::string_view state = read_of_thread(o->system_thread, "stat", text, sizeof text);
  if (state.empty()) return true;
  const size_t name = state.rfind(')');
  const bool sleeps = name != std::string_view::npos && name + 2 < state.size() && state[name + 2] == 'S';
  const std::string_view ran = read_of_thread(o->system_thread, "schedstat", times, sizeof times - 1);
  times[ran.size()] = 0;
  const uint64_t ran_ns = ran.empty() ? now : std::strtoull(times, nullptr, 10);  // not recorded: it never rests
  if (sleeps && o->looked_ns && ran_ns - o->ran_ns <= (now - o->looked_ns) / 20) return now - o->looked_ns >= long_ns;
  o->looked_ns = sleeps ? now : 0;
  o->ran_ns = ran_ns;
  return false;
}

Elsewhere elsewhere() {
  Elsewhere found = Elsewhere::kWaits;
  const bool told = each_other_thread([&](unsigned long, PyFrameObject* top) { found = std::max(found, does(top)); });
  return told ? found : Elsewhere::kGradients;
}

void let_others_end_their_ops(Pool* pool) {
  std::vector<Other> found;
  std::unordered_map<unsigned long, unsigned long> system_threads;
  PyInterpreterState* const all = PyThreadState_GetInterpreter(PyThreadState_Get());
  for (PyThreadState* t = PyInterpreterState_ThreadHead(all); t; t = PyThreadState_Next(t))
    system_threads[t->thread_id] = t->native_thread_id;
  each_other_thread([&](unsigned long thread, PyFrameObject* top) {
    const unsigned long system_thread = system_threads[thread];
    if (does(top) != Elsewhere::kWaits)
      found.push_back({thread, {system_thread}, top, PyFrame_GetLasti(top), ops_counted_of(system_thread)});
  });
  if (found.empty()) return;
  const Hold lock(others->lock);
  others->all = std::move(found);
  others->until_ns = 0;
  others->pool = pool;
  if (!waiting_for_others.exchange(true)) freeze_all_evictions(true);
}

void give_others_a_moment() {
  for (int i = 0; i < 3 && waiting_for_others.load(); ++i) {
    Py_BEGIN_ALLOW_THREADS;
    if (others_are_in_their_ops()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    Py_END_ALLOW_THREADS;
    std::unordered_map<unsigned long, std::pair<const void*, int>> now;
    if (!each_other_thread(
            [&](unsigned long thread, PyFrameObject* top) { now[thread] = {top, PyFrame_GetLasti(top)}; }))
      return;
    const Hold lock(others->lock);
    remove_locked([&](const Other& o) {
      const auto there = now.find(o.thread);
      return there == now.end() || there->second != std::pair<const void*, int>{o.frame, o.instruction};
    });
  }
}

bool others_are_in_their_ops() {
  if (!waiting_for_others.load()) return false;
  constexpr uint64_t kMostNs = 10'000'000'000;
  constexpr uint64_t kLongNs = 50'000'000;  // OpenMP's other threads may be longer at their pieces of its op
  Pool* pool;
  bool late;
  {
    const Hold lock(others->lock);
    const uint64_t now = now_ns();
    if (!others->until_ns) others->until_ns = now + kMostNs;
    late = now > others->until_ns;
    remove_locked([&](Other& o) {
      return late || ops_counted_of(o.sleeper.system_thread) != o.ops || rests(&o.sleeper, now, kLongNs);
    });
    if (!others->all.empty()) return true;
    pool = others->pool;
  }
  if (!settled(pool) && !late) return true;  // the ops have ended, and no cell records the work that they queued
  const Hold lock(others->lock);
  end_freeze_locked();
  return !others->all.empty();
}

void forget_others() {
  const Hold lock(others->lock);
  others->all.clear();
  end_freeze_locked();
}

bool raise_in(unsigned long thread, PyObject* exception, std::string_view package) {
  bool raised = false;
  each_other_thread([&](unsigned long id, PyFrameObject* top) {
    if (id != thread) return;
    const std::string module = module_of(reinterpret_cast<PyObject*>(top)) + ".";
    raised = module.compare(0, package.size() + 1, std::string(package) + ".") == 0 &&
             PyThreadState_SetAsyncExc(thread, exception) > 0;
  });
  return raised;
}

}  // namespace memmgr::pager
