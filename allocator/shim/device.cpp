// Memory of an accelerator: which one the budget is about, its allocator, and what needs a stream (rule 5).
//
// One device is managed at a time. Its tensors live on when the budget is closed: their blocks go back to the device
// that they came from, which is found by address.
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "shim.h"

namespace memmgr {

bool managed_here(const c10::StorageImpl* s) {
  if (!g.device) return s->device_type() == c10::DeviceType::CPU;
  const c10::Device where = s->device();
  return where.type() == g.place.type() && (where.index() == g.place.index() || where.index() < 0);
}

c10::DispatchKeySet keys_of(c10::DeviceType type) {
  switch (type) {
    case c10::DeviceType::CUDA:
      return c10::DispatchKeySet(c10::DispatchKey::CUDA);
    case c10::DeviceType::PrivateUse1:
      return c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
    default:
      return c10::DispatchKeySet(c10::DispatchKey::CPU);
  }
}

// The calling thread's stream on the managed device.
mm_stream stream_now() {
  if (!g.device) return nullptr;
  const auto* guard = c10::impl::getDeviceGuardImpl(g.place.type());
  return guard->getStreamNativeHandle(guard->getStream(g.place));
}

// ---- several streams ----

// The rules without which memory would be reused, or read, too early (docs/internals/streams.md has the harms).
// Tests name one to be left out and see bits change.
static const std::unordered_map<std::string, uint32_t> kStreamRules{
    {"", 0},
    {"uses", RULE_USES},
    {"unpacked", RULE_UNPACKED},
    {"replayed", RULE_REPLAYED},
    {"exposed", RULE_EXPOSED},
    {"filled", RULE_FILLED},
    {"filled.replay", RULE_FILLED_REPLAY},
    {"prefetched", RULE_PREFETCHED},
    {"checked", RULE_CHECKED},
    {"asleep", RULE_ASLEEP},
};
static std::atomic<uint32_t> left_out{0};

bool rule_holds(StreamRule rule) { return !(left_out.load(std::memory_order_relaxed) & rule); }

// leave_out(name): for tests; "" puts all back.
static PyObject* py_leave_out(PyObject*, PyObject* o) {
  const char* name = PyUnicode_AsUTF8(o);
  if (!name) return nullptr;
  auto it = kStreamRules.find(name);
  if (it == kStreamRules.end()) return PyErr_Format(PyExc_ValueError, "no such rule: %s", name);
  left_out = it->second;
  Py_RETURN_NONE;
}

// stream_rules() -> the names that leave_out() takes.
static PyObject* py_stream_rules(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  for (const auto& [name, rule] : kStreamRules) {
    if (!names || !rule) continue;
    PyObject* text = PyUnicode_FromString(name.c_str());
    if (text) PyList_Append(names, text);
    Py_XDECREF(text);
  }
  return names;
}

// Is the calling thread's stream another one than all that were seen? Programs with one stream pay this question only.
static bool another_stream(mm_stream now) {
  if (g.several_streams.load(std::memory_order_relaxed)) return true;
  if (now == g.main_stream) return false;
  g.several_streams.store(true);
  return true;
}

static void note_use(c10::StorageImpl* s, mm_stream now) {
  if (!managed_here(s)) return;
  void* p = s->_mutable_data_ptr_no_checks().get();
  if (p && mm_arena_owns(g.arena, p) && mm_device_home(g.device, p) != now) mm_device_used(g.device, p, now);
}

// The storage is used on the calling thread's stream. Autograd keeps saved tensors until backward, so programs need not
// keep them alive, or name the stream to the allocator, for as long as we may let go of them.
void note_stream(c10::StorageImpl* s, StreamRule rule) {
  if (!g.device) return;
  const mm_stream now = stream_now();
  another_stream(now);  // is remembered
  if (rule_holds(rule)) note_use(s, now);
}

static void note_streams_in(PyObject* o, mm_stream now) {
  if (!o || o == Py_None) return;
  if (c10::TensorImpl* t = impl_of(o)) {
    if (is_plain(t)) note_use(t->unsafe_storage().unsafeGetStorageImpl(), now);
  } else if (PyTuple_Check(o) || PyList_Check(o)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(o); ++i) note_streams_in(PySequence_Fast_GET_ITEM(o, i), now);
  }
}

void note_streams(PyObject* args, PyObject* kwargs) {
  const mm_stream now = stream_now();
  if (!another_stream(now) || !rule_holds(RULE_USES)) return;
  note_streams_in(args, now);
  if (kwargs && kwargs != Py_None) {
    PyObject *k, *v;
    Py_ssize_t pos = 0;
    while (PyDict_Next(kwargs, &pos, &k, &v)) note_streams_in(v, now);
  }
}

// The program put the streams in order behind the op that made the bytes, not behind our making them again elsewhere.
// `filled_on` is the cell's; the caller has the GIL and keeps the bytes from leaving. False: Python error set.
bool wait_for_filling(const c10::StorageImpl* s, mm_stream filled_on, StreamRule rule) {
  if (!g.device || filled_on == kNotFilled || !managed_here(s)) return true;
  const mm_stream now = stream_now();
  if (now == filled_on || !rule_holds(rule)) return true;
  int rc;
  // A stream that the program has destroyed meanwhile is waited for by the CPU.
  Py_BEGIN_ALLOW_THREADS rc = mm_device_wait(g.device, now, filled_on);
  Py_END_ALLOW_THREADS if (rc == 0) return true;
  PyErr_SetString(PyExc_RuntimeError,
                  "memmgr: the stream on which a saved tensor was brought back cannot be waited for (a capture?)");
  return false;
}

// What was used while nobody looked (the recorder sleeps) is used no more when this returns true. Without the GIL.
bool quiet_device() { return !g.device || !rule_holds(RULE_ASLEEP) || mm_device_synchronize(g.device) == 0; }

// ---- bytes ----

// What the bytes are on the calling thread's stream; on a device this waits for them, so the GIL is not to be held.
// False: they cannot be had.
bool checksum_of(const c10::Device& where, const void* p, size_t n, uint64_t* sum) {
  if (where.type() == c10::DeviceType::CPU) {
    *sum = checksum_bytes(p, n);
    return true;
  }
  std::unique_ptr<char[]> bounce(new (std::nothrow) char[n]);  // not filled with zeros first
  if (!bounce || mm_device_fetch(g.device, bounce.get(), p, n, stream_now()) != 0) return false;
  *sum = checksum_bytes(bounce.get(), n);
  return true;
}

// The same for bytes that nobody uses any more: whoever wrote them, on whatever stream, is waited for.
bool last_checksum_of(const c10::Device& where, const void* p, size_t n, uint64_t* sum) {
  if (g.device && rule_holds(RULE_CHECKED) && mm_device_wait_block(g.device, stream_now(), p) != 0) return false;
  return checksum_of(where, p, n, sum);
}

// A block in the order of `home` if there is room without letting go of anything.
at::DataPtr try_block(size_t n, uint64_t keep_free, mm_stream home) {
  if (on_cuda()) {
    void* p = g.plugin->try_allocate(g.place.index(), n, keep_free, home);
    return {p, p, g.plugin->release, g.place};
  }
  void* p = g.device ? mm_device_try_alloc(g.device, n, keep_free, home) : mm_arena_try_alloc(g.arena, n, keep_free);
  return {p, p, g.device ? &device_free : &arena_free, g.place};
}

static void* device_allocate(size_t n, mm_stream stream);

// A block for bytes that come back, on the calling thread's stream: of the managed device, whichever is current, and
// from our memory, whether or not a budget is still open.
at::DataPtr managed_block(size_t n) {
  if (!g.device) return c10::GetAllocator(c10::DeviceType::CPU)->allocate(n);
  if (on_cuda()) {
    const c10::DeviceGuard here(g.place);
    return c10::GetAllocator(g.place.type())->allocate(n);
  }
  void* p = device_allocate(n, stream_now());
  if (!p) throw_out_of_memory(n);
  return {p, p, &device_free, g.place};
}

// A storage of its own with the same bytes, in order of the calling thread's stream. Null: on another device than the
// managed one, or the device refuses.
//
// Raises: c10::Error when there is no room.
StorageRef storage_copy(const c10::StorageImpl* from) {
  const bool here = managed_here(from);
  if (!here && from->device_type() != c10::DeviceType::CPU) return {};
  const size_t n = from->nbytes();
  c10::Allocator* a = c10::GetAllocator(from->device_type());
  auto copy = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), n,
                                                    here ? managed_block(n) : a->allocate(n), a, true);
  void* to = copy->_mutable_data_ptr_no_checks().get();
  if (from->device_type() == c10::DeviceType::CPU)
    std::memcpy(to, from->data(), n);
  else if (mm_device_copy(g.device, to, from->data(), n, stream_now()) != 0)
    return {};
  return copy;
}

const char* out_of_memory_words() {
  if (!g.device) return "DefaultCPUAllocator: can't allocate memory: you tried to allocate ";
  return on_cuda() ? "CUDA out of memory. Tried to allocate " : "Device out of memory. Tried to allocate ";
}

// ---- the allocator ----

// Of g.devices: one kind in a process. g.place may be another's by the time that a block of theirs is freed.
static c10::DeviceType devices_type = c10::DeviceType::PrivateUse1;

static mm_device* owner_of(const void* p) {
  if (g.device && mm_arena_owns(mm_device_arena(g.device), p)) return g.device;
  for (mm_device* device : g.devices)
    if (device && mm_arena_owns(mm_device_arena(device), p)) return device;
  return nullptr;
}

void device_free(void* p) {
  mm_device* device = p ? owner_of(p) : nullptr;
  if (!device) return;
  if (C10_UNLIKELY(c10::memoryProfilingEnabled()))
    tell_profiler(mm_device_arena(device), {devices_type, static_cast<c10::DeviceIndex>(mm_device_ordinal(device))}, p,
                  false);
  mm_device_free(device, p);
}

// What an allocation on the managed device is under a budget. Null: no room, and nothing more can be let go.
static void* device_allocate(size_t n, mm_stream stream) {
  void* p = tl_no_reclaim ? mm_device_try_alloc(g.device, n, 0, stream) : mm_device_alloc(g.device, n, stream, tl_side);
  if (!p) return nullptr;
  if (n > g.largest_request.load(std::memory_order_relaxed)) g.largest_request.store(n, std::memory_order_relaxed);
  if (n >= 512 && counts_for_floor()) scan_floor(false);
  return p;
}

// For backends whose allocator is looked up at every use. CUDA's is installed before CUDA is initialised.
struct DeviceAllocator final : c10::Allocator {
  c10::Allocator* previous = nullptr;
  at::DataPtr allocate(size_t n) override {
    const at::Device where = c10::impl::getDeviceGuardImpl(devices_type)->getDevice();
    if (n == 0) return {nullptr, nullptr, &device_free, where};
    // Storages remember this allocator, and may grow when no budget is open, or one on another device.
    if (!g.installed.load(std::memory_order_relaxed) || g.forked.load(std::memory_order_relaxed) || where != g.place)
      return previous->allocate(n);
    void* p = device_allocate(n, stream_now());
    if (!p) throw_out_of_memory(n);
    if (C10_UNLIKELY(c10::memoryProfilingEnabled())) tell_profiler(g.arena, where, p, true);
    return {p, p, &device_free, where};
  }
  at::DeleterFnPtr raw_deleter() const override { return &device_free; }
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    previous->copy_data(dest, src, count);
  }
};

static DeviceAllocator* the_device_allocator() {
  static auto* a = new DeviceAllocator;  // never destroyed: storages remember it
  return a;
}

// ---- CUDA ----

bool on_cuda() { return g.device && g.place.type() == c10::DeviceType::CUDA; }

// Does any memory of ours hold this address?
bool ours(const void* p) {
  if (g.host_arena && mm_arena_owns(g.host_arena, p)) return true;
  return owner_of(p) != nullptr || (g.plugin && g.plugin->owns(p));
}

// The limit on what is managed now. CUDA's allocator knows another one, of the program's own.
void set_budget(uint64_t bytes) {
  if (on_cuda())
    g.plugin->set_budget(g.place.index(), bytes);
  else if (g.arena)
    mm_arena_set_budget(g.arena, bytes);
}

static const mm_plugin_hooks* hooks_of(int ordinal) {
  static mm_plugin_hooks hooks[64];  // one for each device: another thread may still be looking at the last budget's
  hooks[ordinal] = {ordinal, &device_allocate, [] { return tl_no_reclaim ? 1 : 0; }, &throw_out_of_memory};
  return &hooks[ordinal];
}

int install_device_allocator() {
  if (on_cuda()) {
    g.previous = c10::GetAllocator(c10::DeviceType::CUDA);
    g.installed.store(true);
    g.plugin->set_hooks(hooks_of(g.place.index()));
    return 0;
  }
  devices_type = g.place.type();
  c10::Allocator* now = c10::GetAllocator(g.place.type());
  if (now != the_device_allocator()) the_device_allocator()->previous = now;
  g.previous = the_device_allocator()->previous;
  g.installed.store(true);
  c10::SetAllocator(g.place.type(), the_device_allocator(), 255);
  return 0;
}

void uninstall_device_allocator() {
  if (on_cuda())
    g.plugin->set_hooks(nullptr);
  else
    c10::SetAllocator(g.place.type(), g.previous, 255);
  g.installed.store(false);
}

}  // namespace memmgr
