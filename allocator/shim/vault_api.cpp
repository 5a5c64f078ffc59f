// The arena, the tier and the counters as Python sees them.
#include <poll.h>

#include "shim.h"

namespace memmgr {

static PyObject* py_leave_out(PyObject*, PyObject* o);
static PyObject* py_stream_rules(PyObject*, PyObject*);

// ---- Python's view of the vault ----

static PyObject* begin_budget(uint64_t budget, uint64_t outside);

// The budgets are about something else from now on. Nobody knows later which stream has to wait for what we brought
// back there, so that is waited for now.
static void leave_device(const mm_device* next) {
  if (!g.device || g.device == next) return;
  Py_BEGIN_ALLOW_THREADS mm_device_synchronize(g.device);
  Py_END_ALLOW_THREADS
}

// place() -> what the last budget was about, as torch writes it.
static PyObject* py_place(PyObject*, PyObject*) { return PyUnicode_FromString(g.place.str().c_str()); }

static PyObject* py_open_arena(PyObject*, PyObject* args) {
  unsigned long long budget, outside, reserve = 0;
  if (!PyArg_ParseTuple(args, "KK|K", &budget, &outside, &reserve)) return nullptr;
  if (!g.host_arena) {
    char err[256] = "";
    g.host_arena = mm_arena_create(budget, reserve, err, sizeof err);
    if (!g.host_arena) return PyErr_Format(PyExc_RuntimeError, "memmgr: no address range: %s", err);
  }
  leave_device(nullptr);
  g.arena = g.host_arena;
  g.device = nullptr;
  g.place = c10::Device(c10::DeviceType::CPU);
  return begin_budget(budget, outside);
}

// open_device(type, ordinal, driver, memory, budget, outside): the same for an accelerator. `driver` None: CUDA's own.
static PyObject* py_open_device(PyObject*, PyObject* args) {
  const char *type, *driver_path;
  int ordinal, memory;
  unsigned long long budget, outside;
  if (!PyArg_ParseTuple(args, "siziKK", &type, &ordinal, &driver_path, &memory, &budget, &outside)) return nullptr;
  if (ordinal < 0 || ordinal >= 64) return PyErr_Format(PyExc_ValueError, "memmgr: no device %d", ordinal);
  char err[256] = "";
  const c10::Device place(std::string(type) + ":" + std::to_string(ordinal));
  mm_device* device = g.devices[ordinal];
  if (place.type() == c10::DeviceType::CUDA) {
    if (!g.plugin) return PyErr_Format(PyExc_RuntimeError, "memmgr: torch has its own CUDA allocator");
    device = g.plugin->device(ordinal, err, sizeof err);
    if (!device) return PyErr_Format(PyExc_RuntimeError, "memmgr: no device memory: %s", err);
  } else if (!device) {
    const mm_driver* driver = mm_driver_load(driver_path, err, sizeof err);
    if (!driver) return PyErr_Format(PyExc_RuntimeError, "memmgr: no driver: %s", err);
    device = g.devices[ordinal] = mm_device_open(driver, ordinal, budget, memory, err, sizeof err);
    if (!device) return PyErr_Format(PyExc_RuntimeError, "memmgr: no device memory: %s", err);
  }
  leave_device(device);
  g.device = device;
  g.arena = mm_device_arena(g.device);
  g.place = place;
  g.main_stream = stream_now();
  g.several_streams = false;
  return begin_budget(budget, outside);
}

// use_plugin(address): CUDA's allocator is ours, and this is its table (memmgr/plugin.h).
static PyObject* py_use_plugin(PyObject*, PyObject* o) {
  const auto* plugin = static_cast<const mm_plugin*>(PyLong_AsVoidPtr(o));
  if (PyErr_Occurred()) return nullptr;
  if (plugin && plugin->version != MM_PLUGIN_VERSION)
    return PyErr_Format(PyExc_RuntimeError, "memmgr: the CUDA allocator is of another version than the shim");
  g.plugin = plugin;
  Py_RETURN_NONE;
}

// What every budget begins with, wherever its memory lies.
static PyObject* begin_budget(uint64_t budget, uint64_t outside) {
  set_budget(budget);
  mm_arena_set_outside(g.arena, outside);
  mm_arena_reset_peak(g.arena);
  mm_arena_reset_counts(g.arena);
  g.floor_bytes = 0;
  g.held_peak_bytes = 0;
  g.held_estimate = 0;
  g.largest_request = 0;
  g.search = -1;
  mm_arena_set_layout(g.arena, MM_REMAP_FIRST, 0);
  g.tier_error.clear();
  if (install_allocator() != 0) return PyErr_Format(PyExc_RuntimeError, "memmgr: cannot install in a forked child");
  Py_RETURN_NONE;
}

static PyObject* py_close_arena(PyObject*, PyObject*) {
  uninstall_allocator();
  if (g.arena) {
    set_budget(MM_UNLIMITED);
    mm_arena_set_outside(g.arena, 0);
    Py_BEGIN_ALLOW_THREADS if (g.device) mm_device_trim(g.device, 0);
    else mm_arena_trim(g.arena, 0);
    Py_END_ALLOW_THREADS
  }
  Py_RETURN_NONE;
}

// The daemon sleeps on an eventfd, so that a thread without the GIL can wake it.
static PyObject* py_daemon_open(PyObject*, PyObject*) {
  if (g.daemon_fd < 0) g.daemon_fd = eventfd(0, EFD_CLOEXEC);
  if (g.daemon_fd < 0) return PyErr_SetFromErrno(PyExc_OSError);
  Py_RETURN_NONE;
}

static PyObject* py_daemon_wake(PyObject*, PyObject*) {
  const uint64_t one = 1;
  if (g.daemon_fd >= 0 && write(g.daemon_fd, &one, sizeof one) < 0) return PyErr_SetFromErrno(PyExc_OSError);
  Py_RETURN_NONE;
}

// daemon_wait(seconds) -> bytes that a thread in malloc asks for, 0: somebody else woke us, or the time is up (never if
// negative)
static PyObject* py_daemon_wait(PyObject*, PyObject* o) {
  const double seconds = PyFloat_AsDouble(o);
  if (PyErr_Occurred()) return nullptr;
  uint64_t n = 0;
  pollfd bell{g.daemon_fd, POLLIN, 0};
  ssize_t got = 0;
  Py_BEGIN_ALLOW_THREADS if (poll(&bell, 1, seconds < 0 ? -1 : static_cast<int>(seconds * 1e3) + 1) > 0) got =
      read(bell.fd, &n, sizeof n);
  Py_END_ALLOW_THREADS if (got < 0 && errno == EINTR && PyErr_CheckSignals() < 0) return nullptr;
  std::lock_guard<std::mutex> lock(g.ask_mu);
  return PyLong_FromUnsignedLongLong(g.answered < g.asked ? g.ask_bytes : 0);
}

static PyObject* py_daemon_answer(PyObject*, PyObject* o) {
  {
    std::lock_guard<std::mutex> lock(g.ask_mu);
    g.answered = g.asked;
    g.answer_bytes = PyLong_AsUnsignedLongLong(o);
  }
  g.answered_cv.notify_all();
  Py_RETURN_NONE;
}

static PyObject* py_daemon_close(PyObject*, PyObject*) {
  if (g.daemon_fd >= 0) close(g.daemon_fd);
  g.daemon_fd = -1;
  Py_RETURN_NONE;
}

static PyObject* py_peak(PyObject*, PyObject*) {
  // (highest resident since the last call, highest unmanaged need since then)
  mm_arena_stats s{};
  if (g.arena) mm_arena_stats_get(g.arena, &s);
  return Py_BuildValue("KK", (unsigned long long)s.resident_peak_bytes, (unsigned long long)s.unmanaged_peak_bytes);
}

static PyObject* py_reset_peak(PyObject*, PyObject*) {
  if (g.arena) mm_arena_reset_peak(g.arena);
  Py_RETURN_NONE;
}

static PyObject* py_unpack_count(PyObject*, PyObject*) { return PyLong_FromUnsignedLongLong(g.n.unpacks.load()); }

static PyObject* py_stalled(PyObject*, PyObject*) {
  return PyFloat_FromDouble(1e-9 * static_cast<double>(g.n.stall_ns.load()));
}

static PyObject* py_open_tier(PyObject*, PyObject* args) {
  const char* folder;
  unsigned long long capacity, rate;
  int workers;
  if (!PyArg_ParseTuple(args, "sKKi", &folder, &capacity, &rate, &workers)) return nullptr;
  char err[256] = "";
  mm_tier* t = mm_tier_open(folder, capacity, rate, workers, err, sizeof err);
  if (!t) return PyErr_Format(PyExc_OSError, "memmgr: cannot open a tier file in %s: %s", folder, err);
  std::lock_guard<std::mutex> lock(g.mu);
  g.tier = t;
  Py_RETURN_NONE;
}

// open_host_tier(capacity): page-locked memory below the device.
static PyObject* py_open_host_tier(PyObject*, PyObject* o) {
  const unsigned long long capacity = PyLong_AsUnsignedLongLong(o);
  if (PyErr_Occurred()) return nullptr;
  if (!g.device) return PyErr_Format(PyExc_RuntimeError, "memmgr: there is no device to have a host tier below");
  char err[256] = "";
  mm_tier* t;
  Py_BEGIN_ALLOW_THREADS t = mm_tier_open_host(g.device, capacity, err, sizeof err);
  Py_END_ALLOW_THREADS if (!t) return PyErr_Format(PyExc_OSError, "memmgr: no page-locked memory: %s", err);
  std::lock_guard<std::mutex> lock(g.mu);
  g.tier = t;
  Py_RETURN_NONE;
}

// Slots are the tier's: whoever still has one gives it back before the tier goes. What is only there is lost with it.
static void forget_slots() {
  if (!g.tier) return;
  std::vector<Cell*> cells;
  {
    std::lock_guard<std::mutex> lock(g.mu);
    for (Cell* c = g.oldest; c; c = c->next) cells.push_back(c);
  }
  for (auto& [s, c] : g.table) cells.push_back(c);
  for (Cell* c : cells) {
    if (c->slot < 0) continue;
    discard_copy(c);
    std::lock_guard<std::mutex> lock(g.mu);
    if (c->gone == OFFLOADED) {
      c->gone = EVICTED;
      g.offloaded_cells--;
      g.offloaded_bytes -= std::min<uint64_t>(g.offloaded_bytes, c->nbytes);
    }
  }
}

// Closes the tier as soon as no cell needs it: at once, or with the last handle (after an exception the graph lives on
// in its traceback, and bringing everything back would pass the budget).
void close_doomed_tier() {
  if (!g.tier_doomed) return;
  if (g.offloaded_cells == 0) forget_slots();
  mm_tier* t = nullptr;
  {
    std::lock_guard<std::mutex> lock(g.mu);
    if (g.offloaded_cells > 0) return;
    t = g.tier;
    g.tier = nullptr;
    g.tier_doomed = false;
  }
  if (t) mm_tier_close(t);
}

static PyObject* py_doom_tier(PyObject*, PyObject*) {
  g.tier_doomed = g.tier != nullptr;
  close_doomed_tier();
  Py_RETURN_NONE;
}

static PyObject* py_close_tier(PyObject*, PyObject*) {
  g.tier_doomed = false;
  forget_slots();
  mm_tier* t;
  {
    std::lock_guard<std::mutex> lock(g.mu);
    t = g.tier;
    g.tier = nullptr;
  }
  if (t) {
    Py_BEGIN_ALLOW_THREADS mm_tier_close(t);
    Py_END_ALLOW_THREADS
  }
  Py_RETURN_NONE;
}

static PyObject* py_tier_inject(PyObject*, PyObject* args) {
  int we, wa, re, ra;
  if (!PyArg_ParseTuple(args, "iiii", &we, &wa, &re, &ra)) return nullptr;
  if (g.tier) mm_tier_inject(g.tier, we, wa, re, ra);
  Py_RETURN_NONE;
}

static PyObject* py_add_outside(PyObject*, PyObject* args) {
  long long delta;
  if (!PyArg_ParseTuple(args, "L", &delta)) return nullptr;
  if (g.arena) mm_arena_add_outside(g.arena, delta);
  Py_RETURN_NONE;
}

static PyObject* py_set_budget(PyObject*, PyObject* args) {
  unsigned long long budget;
  if (!PyArg_ParseTuple(args, "K", &budget)) return nullptr;
  set_budget(budget);
  Py_RETURN_NONE;
}

static PyObject* py_set_options(PyObject*, PyObject* args) {
  int may_evict, may_offload, verify;
  unsigned sample;
  if (!PyArg_ParseTuple(args, "pppI", &may_evict, &may_offload, &verify, &sample)) return nullptr;
  g.may_evict = may_evict;
  g.may_offload = may_offload;
  g.verify = verify;
  g.sample = sample;
  Py_RETURN_NONE;
}

// set_link(seconds_per_byte): what a byte's way to the tier and back takes.
static PyObject* py_set_link(PyObject*, PyObject* o) {
  const double seconds = PyFloat_AsDouble(o);
  if (PyErr_Occurred()) return nullptr;
  std::lock_guard<std::mutex> lock(g.mu);
  g.link_seconds_per_byte = seconds;
  Py_RETURN_NONE;
}

static PyObject* py_set_watching(PyObject*, PyObject* o) {
  g.watching = PyObject_IsTrue(o) == 1;
  Py_RETURN_NONE;
}

static PyObject* py_resident(PyObject*, PyObject*) {
  return PyLong_FromUnsignedLongLong(g.arena ? mm_arena_resident(g.arena) : 0);
}

static PyObject* py_pressure(PyObject*, PyObject*) {
  std::lock_guard<std::mutex> lock(g.mu);
  return Py_BuildValue("KKKKKKL", g.arena ? mm_arena_resident(g.arena) : 0ull,
                       g.arena ? mm_arena_budget(g.arena) : 0ull, (unsigned long long)g.handled_bytes,
                       (unsigned long long)g.gone_bytes, (unsigned long long)g.armed_bytes,
                       (unsigned long long)g.largest_request.load(), (long long)g.offloaded_cells);
}

static PyObject* py_reserve_bytes(PyObject*, PyObject*) {
  return PyLong_FromUnsignedLongLong(g.arena ? reserve_bytes() : 0);
}

static void put_object(PyObject* d, const char* key, PyObject* o) {
  if (o) {
    PyDict_SetItemString(d, key, o);
    Py_DECREF(o);
  }
}

static void put(PyObject* d, const char* key, uint64_t v) { put_object(d, key, PyLong_FromUnsignedLongLong(v)); }
static void put(PyObject* d, const char* key, double v) { put_object(d, key, PyFloat_FromDouble(v)); }

static PyObject* py_arena_stats(PyObject*, PyObject*) {
  PyObject* d = PyDict_New();
  if (!d) return nullptr;
  if (g.arena) {
    mm_arena_stats s;
    mm_arena_stats_get(g.arena, &s);
    put(d, "budget_bytes", s.budget_bytes);
    put(d, "outside_bytes", s.outside_bytes);
    put(d, "live_bytes", s.live_bytes);
    put(d, "live_peak_bytes", s.live_peak_bytes);
    put(d, "resident_peak_bytes", s.resident_peak_bytes);
    put(d, "requested_bytes", s.requested_bytes);
    put(d, "committed_bytes", s.committed_bytes);
    put(d, "committed_peak_bytes", s.committed_peak_bytes);
    put(d, "live_blocks", s.live_blocks);
    put(d, "free_bytes", s.free_bytes);
    put(d, "largest_free_bytes", s.largest_free_bytes);
    put(d, "allocations", s.allocations);
    put(d, "frees", s.frees);
    put(d, "reclaims", s.reclaims);
    put(d, "reclaims_contiguity", s.reclaims_contiguity);
    put(d, "reclaim_nanoseconds", s.reclaim_nanoseconds);
    put(d, "failures", s.failures);
    put(d, "small_blocks", s.small_blocks);
    put(d, "unmanaged_peak_bytes", s.unmanaged_peak_bytes);
    put(d, "remapped_bytes", s.remapped_bytes);
    put(d, "searches", s.searches);
    put(d, "search_nanoseconds", s.search_nanoseconds);
    put(d, "search_max_nanoseconds", s.search_max_nanoseconds);
    put(d, "episodes", s.episodes);
    put(d, "episodes_contiguity", s.episodes_contiguity);
    put(d, "evicted_bytes", s.evicted_bytes);
    put(d, "evicted_beyond_bytes", s.evicted_beyond_bytes);
    put(d, "evicted_excess_bytes", s.evicted_excess_bytes);
    put(d, "longest_run_bytes", s.longest_run_bytes);
    put(d, "placeable_bytes", s.placeable_bytes);
    put(d, "free_share_sum", s.free_share_sum);
    put(d, "free_share_max", s.free_share_max);
    put(d, "fragmentation_sum", s.fragmentation_sum);
    put(d, "fragmentation_max", s.fragmentation_max);
  }
  return d;
}

static PyObject* py_tier_stats(PyObject*, PyObject*) {
  PyObject* d = PyDict_New();
  if (!d) return nullptr;
  if (g.tier) {
    mm_tier_stats s;
    mm_tier_stats_get(g.tier, &s);
    put(d, "capacity_bytes", s.capacity_bytes);
    put(d, "used_bytes", s.used_bytes);
    put(d, "used_peak_bytes", s.used_peak_bytes);
    put(d, "file_bytes", s.file_bytes);
    put(d, "written_bytes", s.written_bytes);
    put(d, "read_bytes", s.read_bytes);
    put(d, "write_nanoseconds", s.write_nanoseconds);
    put(d, "read_nanoseconds", s.read_nanoseconds);
    put(d, "queued_write_bytes", s.queued_write_bytes);
    put(d, "queued_read_bytes", s.queued_read_bytes);
    put(d, "writes", s.writes);
    put(d, "reads", s.reads);
    put(d, "errors", s.errors);
    put(d, "direct", static_cast<uint64_t>(s.direct));
  }
  return d;
}

static PyObject* py_device_stats(PyObject*, PyObject*) {
  PyObject* d = PyDict_New();
  if (!d) return nullptr;
  if (g.device) {
    mm_device_stats s;
    mm_device_stats_get(g.device, &s);
    put(d, "waits", s.waits);
    put(d, "cross_reuses", s.cross_reuses);
    put(d, "synchronizations", s.synchronizations);
    put(d, "maps", s.maps);
    put(d, "unmaps", s.unmaps);
    put(d, "map_nanoseconds", s.map_nanoseconds);
    put(d, "unmap_nanoseconds", s.unmap_nanoseconds);
    put(d, "streams", s.streams);
    put(d, "pools", s.pools);
    put(d, "driver_errors", s.driver_errors);
  }
  return d;
}

static PyObject* py_synchronize(PyObject*, PyObject*) {
  if (g.device) {
    Py_BEGIN_ALLOW_THREADS mm_device_synchronize(g.device);
    Py_END_ALLOW_THREADS
  }
  Py_RETURN_NONE;
}

static PyObject* py_several_streams(PyObject*, PyObject*) { return PyBool_FromLong(g.several_streams.load()); }

static PyObject* py_counters(PyObject*, PyObject*) {
  PyObject* d = PyDict_New();
  if (!d) return nullptr;
#define PUT(name) put(d, #name, g.n.name.load())
  PUT(evictions);
  PUT(evicted_bytes);
  PUT(offloads);
  PUT(offload_bytes);
  PUT(reloads);
  PUT(reload_bytes);
  PUT(prefetch_hits);
  PUT(prefetch_misses);
  PUT(prefetch_cancels);
  PUT(clean_drops);
  PUT(stall_ns);
  PUT(recorded_ops);
  PUT(packs);
  PUT(unpacks);
  PUT(write_backs);
  PUT(unranked);
  PUT(tier_errors);
  PUT(binarized);
  PUT(binarized_bytes);
  PUT(expand_ns);
#undef PUT
  uint64_t gone, offloaded;
  {
    std::lock_guard<std::mutex> lock(g.mu);
    gone = g.gone_bytes;
    offloaded = g.offloaded_bytes;
  }
  put(d, "gone_bytes", gone);
  put(d, "offloaded_bytes", offloaded);
  put(d, "bits_bytes", g.bits_bytes.load());
  put(d, "floor_bytes", g.floor_bytes.load());
  put(d, "held_peak_bytes", g.held_peak_bytes.load());
  return d;
}

static PyObject* py_reset_counters(PyObject*, PyObject*) {
#define ZERO(name) g.n.name.store(0)
  ZERO(binarized);
  ZERO(binarized_bytes);
  ZERO(expand_ns);
  ZERO(evictions);
  ZERO(evicted_bytes);
  ZERO(offloads);
  ZERO(offload_bytes);
  ZERO(reloads);
  ZERO(reload_bytes);
  ZERO(prefetch_hits);
  ZERO(prefetch_misses);
  ZERO(prefetch_cancels);
  ZERO(clean_drops);
  ZERO(stall_ns);
  ZERO(recorded_ops);
  ZERO(packs);
  ZERO(unpacks);
  ZERO(write_backs);
  ZERO(unranked);
  ZERO(tier_errors);
#undef ZERO
  Py_RETURN_NONE;
}

static PyObject* py_arena_check(PyObject*, PyObject*) {
  char err[256] = "";
  if (g.arena && mm_arena_check(g.arena, err, sizeof err) != 0) return PyErr_Format(PyExc_AssertionError, "%s", err);
  Py_RETURN_NONE;
}

static int walk_append(void* user, uint64_t offset, uint64_t bytes, int state) {
  PyObject* item = Py_BuildValue("KKi", (unsigned long long)offset, (unsigned long long)bytes, state);
  if (item) {
    PyList_Append(static_cast<PyObject*>(user), item);
    Py_DECREF(item);
  }
  return 0;
}

static PyObject* py_arena_blocks(PyObject*, PyObject*) {
  PyObject* list = PyList_New(0);
  if (list && g.arena) mm_arena_walk(g.arena, &walk_append, list);
  return list;
}

// arena_address() -> of the core's arena, for its C interface; 0 when there is none.
static PyObject* py_arena_address(PyObject*, PyObject*) { return PyLong_FromVoidPtr(g.arena); }

PyMethodDef vault_methods[] = {
    {"arena_address", py_arena_address, METH_NOARGS, "of the core's arena; 0: none"},
    {"open_arena", py_open_arena, METH_VARARGS, "open_arena(budget, outside, reserve=0): install the CPU plug-in"},
    {"open_device", py_open_device, METH_VARARGS, "open_device(type, ordinal, driver, memory, budget, outside)"},
    {"use_plugin", py_use_plugin, METH_O, "use_plugin(address of the table of CUDA's allocator)"},
    {"open_host_tier", py_open_host_tier, METH_O, "open_host_tier(capacity)"},
    {"device_stats", py_device_stats, METH_NOARGS, "of the device that the budget is about; empty: it is the CPU"},
    {"place", py_place, METH_NOARGS, "what the last budget was about: \"cpu\", \"cuda:0\""},
    {"stream_rules", py_stream_rules, METH_NOARGS, "the names that leave_out takes"},
    {"leave_out", py_leave_out, METH_O, "for tests: a rule of streams that is not kept"},
    {"synchronize", py_synchronize, METH_NOARGS, "waits for all that the device has been given"},
    {"several_streams", py_several_streams, METH_NOARGS, "whether work on more than one stream was seen"},
    {"close_arena", py_close_arena, METH_NOARGS, "put torch's own CPU allocator back"},
    {"daemon_open", py_daemon_open, METH_NOARGS, ""},
    {"daemon_wake", py_daemon_wake, METH_NOARGS, ""},
    {"daemon_wait", py_daemon_wait, METH_O, "daemon_wait(seconds) -> bytes that a malloc asks for"},
    {"daemon_answer", py_daemon_answer, METH_O, ""},
    {"daemon_close", py_daemon_close, METH_NOARGS, ""},
    {"peak", py_peak, METH_NOARGS, ""},
    {"reset_peak", py_reset_peak, METH_NOARGS, ""},
    {"unpack_count", py_unpack_count, METH_NOARGS, ""},
    {"stalled", py_stalled, METH_NOARGS, "seconds"},
    {"open_tier", py_open_tier, METH_VARARGS, "open_tier(folder, capacity, bytes_per_second, workers)"},
    {"doom_tier", py_doom_tier, METH_NOARGS, "close the tier when the last cell that needs it is gone"},
    {"close_tier", py_close_tier, METH_NOARGS, ""},
    {"tier_inject", py_tier_inject, METH_VARARGS, "fault injection for tests"},
    {"add_outside", py_add_outside, METH_VARARGS, ""},
    {"set_budget", py_set_budget, METH_VARARGS, ""},
    {"set_options", py_set_options, METH_VARARGS, "set_options(may_evict, may_offload, verify, sample)"},
    {"set_link", py_set_link, METH_O, "set_link(seconds_per_byte): there and back"},
    {"set_watching", py_set_watching, METH_O, "false while the recorder sleeps"},
    {"resident", py_resident, METH_NOARGS, ""},
    {"pressure", py_pressure, METH_NOARGS,
     "(resident, budget, handled, gone, armed, largest request, offloaded cells)"},
    {"reserve_bytes", py_reserve_bytes, METH_NOARGS, "-> what reads ahead leave free"},
    {"arena_stats", py_arena_stats, METH_NOARGS, ""},
    {"tier_stats", py_tier_stats, METH_NOARGS, ""},
    {"counters", py_counters, METH_NOARGS, ""},
    {"reset_counters", py_reset_counters, METH_NOARGS, ""},
    {"arena_check", py_arena_check, METH_NOARGS, ""},
    {"arena_blocks", py_arena_blocks, METH_NOARGS, "[(offset, bytes, state)]"},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace memmgr
