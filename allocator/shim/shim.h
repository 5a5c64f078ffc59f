// memmgr shim: the torch-facing half of the allocator. Compiled once per installed torch, on the user's machine.
//
// Glossary
//   cell     one version of one storage's bytes (design §2)
//   recipe   the op and its arguments that make the bytes of its output cells again
//   ref      a view of a cell: dtype, sizes, strides, offset
//   handle   a ref that autograd (or a ManagedTensor) holds: while a cell has handles, its bytes are wanted
//   strong   our one reference to a cell's storage. "Ours alone" means that its use count is 1: nobody else can reach
//   it gone     the bytes were let go: evicted (the recipe makes them again) or offloaded (a slot of the tier holds
//   them) root     a cell without a recipe names    how many live recipes have the cell among their inputs armed ranked
//   by the policies as a cell that may leave, with the action that they chose
//
// Locks: `g.mu` guards every cell's strong/gone/slot/incoming fields and the lists of cells. It is a leaf as far as
// Python is concerned: neither the GIL nor a call into torch or the tier's blocking functions happens under it.
// Everything else in a cell is guarded by the GIL.
#pragma once
#include <Python.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/GradMode.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <torch/headeronly/version.h>

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "memmgr/core.h"
#include "memmgr/device.h"
#include "memmgr/plugin.h"

namespace memmgr {

// A cell's bytes are still those that the program made: whoever may use them is behind that in stream order already.
inline mm_stream const kNotFilled = reinterpret_cast<mm_stream>(~uintptr_t{0});

using StorageRef = c10::intrusive_ptr<c10::StorageImpl>;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

enum Gone : uint8_t { PRESENT = 0, EVICTED = 1, OFFLOADED = 2 };
enum SlotState : uint8_t { NO_SLOT = 0, WRITING = 1, CLEAN = 2 };
enum Action : uint8_t { KEEP = 0, EVICT = 1, OFFLOAD = 2 };
enum OpClass : uint8_t { OP_VIEW = 0, OP_PURE = 1, OP_SLOW = 2, OP_OPAQUE = 3 };
// What the telemetry is told (watch.cpp). A stall is waiting for room; a reload says how long it was waited for.
enum Happening : uint8_t {
  HAPPENED_EVICT = 0,
  HAPPENED_OFFLOAD = 1,
  HAPPENED_RELOAD = 2,
  HAPPENED_RECOMPUTE = 3,
  HAPPENED_STALL = 4
};
// A kind (rule 7) is NEW until its op was run twice and gave the same bits, then TRUSTED; REFUSED when it did not.
enum Trust : uint8_t { TRUST_NEW = 0, TRUST_YES = 1, TRUST_NO = 2 };

struct Kind {
  uint64_t hash;
  std::atomic<uint8_t> trust{TRUST_NEW};
  PyObject* func;
  double seconds{-1};               // what the op takes, -1: it never ran
  std::atomic<bool> binary{false};  // what it makes could be kept as bits when it was last evicted
};

// What an evicted cell left behind: see bits.cpp.
struct Bits {
  mm_bits packed;
  uint64_t size;
};

// A version counter and the value at which the cell's bytes were seen. Tensors made by `.data` share the storage but
// not the counter, so a cell may have several (rule 3).
struct Version {
  c10::VariableVersion counter;
  uint32_t at;
  bool saved;  // a handle was made under this counter: autograd would have checked it
};

struct Recipe;
struct Cell;

// Membership of a cell in a recipe's inputs; an intrusive list runs through all links of one cell (`Cell::named_by`).
struct Link {
  Recipe* recipe;
  Cell* cell;
  Link* prev;
  Link* next;
};

struct Cell {
  PyObject_HEAD StorageRef strong;
  WeakStorage weak;
  std::vector<Version> versions;
  Recipe* recipe;  // owned; null for roots
  Link* named_by;  // recipes that need this cell
  Cell* prev;      // list of cells with handles, oldest save first
  Cell* next;
  int64_t nbytes;
  int64_t seq;       // order of the first save in this process
  int64_t slot;      // of the tier, -1: none
  int64_t armed_at;  // index in g.armed while armed
  double cost;       // seconds of the op that made it
  double last_access;
  uint64_t checksum;
  void* priced_at;       // the block that has our price (window.cpp), null: none
  at::DataPtr incoming;  // a read is under way into it
  Bits* bits;            // evicted: its bytes, as bits; owned
  mm_stream filled_on;   // present: the stream that we brought its bytes back on; gone: whose block it last had
  const Kind* maker;     // the kind of op that made it, for reports; kinds live as long as the process
  uint32_t module;       // where it was made, while the telemetry asks (0: unknown)
  PyObject* note;        // Python's remark: the module path, for reports
  PyObject* weakrefs;
  int32_t handles;
  int32_t names;
  float price;  // of letting it go, before staleness; negative: not ranked yet
  uint32_t stamp;
  uint32_t saved_in;    // the pass in which it was saved last
  uint32_t save_index;  // its place among the cells that this pass saved, by their first save
  uint8_t wish;         // Action: what the policies would do with it
  uint8_t gone;
  uint8_t slot_state;
  uint8_t armed;   // Action
  bool listed;     // in the list of cells with handles
  bool stale;      // overwritten while handles were alive: their unpack is autograd's error (rule 8)
  bool blank;      // made by empty*: undefined until overwritten
  bool exposed;    // a pointer to it was handed out: raw writes may come unseen (rule 6)
  bool unsettled;  // written by the op that just ran: its counter moves after the dispatch mode has returned
  bool lost;       // a root whose bytes are gone for good
  bool busy;       // a copy is being taken without the lock
  bool has_checksum;
  bool by_plan;  // armed by a plan, which knows how much room there is when it is needed
  bool managed;  // belongs to a ManagedTensor
  bool pinned;   // never released
};

struct Recipe {
  PyObject_HEAD PyObject* func;
  PyObject* args;  // tensors replaced by refs
  PyObject* kwargs;
  PyObject* rng;      // (generator, state) or null
  PyObject* special;  // what Python wants to know at replay, or null
  Link* links;
  int32_t nlinks;
  std::vector<Cell*> outputs;  // borrowed; null where an output has no cell
  Kind* kind;
  int32_t env;
  uint32_t stamp;
  uint32_t module;  // where the op ran, while the telemetry asks
  double cost;
  bool above_drawn;      // of what it reads and nobody saved, something was drawn at random
  double above_seconds;  // of making again what it reads and nobody saved
  uint64_t reads_bytes;  // of inputs that are made again themselves if need be
  uint64_t room_bytes;   // the most that an op of its chain reads and makes: its making takes at least that at once
  bool ok;
};

// An op of the recipe made this many bytes more.
inline void note_made(Recipe* r, int64_t nbytes) {
  r->reads_bytes += static_cast<uint64_t>(nbytes);
  r->room_bytes = std::max(r->room_bytes, r->reads_bytes);
}

// What running the recipe's op once more takes. The kind knows better than one call does: the first call of a shape
// pays for compiling and for cold caches, and any call may have been interrupted.
inline double seconds_of(const Recipe* r) { return r->kind && r->kind->seconds >= 0 ? r->kind->seconds : r->cost; }

// The same with what nobody saved before it. What two inputs share counts twice: it is a guess.
inline double seconds_to_remake(const Recipe* r) { return r->above_seconds + seconds_of(r); }

inline bool is_drawn(const Recipe* r) { return r->rng || r->above_drawn; }

// One call took so long. What counts is about the median of late: a call moves the estimate by five percent towards it,
// however far off it is. Only what took less than half is believed at once, because a first call compiles.
inline void note_seconds(Recipe* r, double seconds) {
  if (!r->kind) {
    r->cost = seconds;
    return;
  }
  double& known = r->kind->seconds;
  if (known <= 0 || (seconds > 0 && seconds < known / 2))
    known = seconds;
  else if (seconds > 0)  // a call that only stalled says nothing, and nothing times 1.05 would stay nothing
    known *= seconds > known ? 1.05 : 1 / 1.05;
  r->cost = known;
}

struct Ref {
  PyObject_HEAD Cell* cell;
  c10::SmallVector<int64_t, 5> sizes;
  c10::SmallVector<int64_t, 5> strides;
  int64_t offset;
  caffe2::TypeMeta dtype;
  c10::DispatchKeySet keys;
  c10::VariableVersion counter;  // of the tensor that was saved; what is unpacked shares it, as autograd's own does
  c10::weak_intrusive_ptr<c10::TensorImpl> leaf;  // of a handle: the tensor itself, if it is a leaf; holds no bytes
  bool mutated;                                   // the op writes to it: replay on a private copy (rule 2)
  bool handle;
};

struct OpInfo {
  PyObject* func;
  PyObject* call;
  uint8_t cls;
  bool mutates;
  bool seeded;  // draws random numbers
  bool dear;    // dear to recompute: its outputs are allocated from the other end
  std::vector<int> written_args;
  std::vector<PyObject*> written_kwargs;
};

// A cell that an op of some thread has just written to. Its version counter moves when the mode's handler has returned
// and the GIL is free again, so another thread that looks in between would see the old count.
struct Written {
  Cell* cell;
  pthread_t by;
  uint64_t at_ns;
};

struct Counters {
  std::atomic<uint64_t> evictions{0}, evicted_bytes{0}, offloads{0}, offload_bytes{0}, reloads{0}, reload_bytes{0},
      prefetch_hits{0}, prefetch_misses{0}, prefetch_cancels{0}, clean_drops{0}, stall_ns{0}, recorded_ops{0}, packs{0},
      unpacks{0}, write_backs{0}, unranked{0}, tier_errors{0}, binarized{0}, binarized_bytes{0}, expand_ns{0};
};

struct Shim {
  std::mutex mu;
  mm_arena* arena = nullptr;          // of the memory that the budget is about: the host's or the device's
  mm_arena* host_arena = nullptr;     // made by the first budget on the CPU device
  mm_device* device = nullptr;        // null: the budget is about the CPU device
  mm_device* devices[64] = {};        // all that were ever opened here: their tensors live on
  const mm_plugin* plugin = nullptr;  // CUDA's allocator, when it is ours: it has the devices then
  c10::Device place{c10::DeviceType::CPU};
  mm_stream main_stream = nullptr;           // of a device: where everything runs, as long as nothing else was seen
  std::atomic<bool> several_streams{false};  // something else was
  mm_tier* tier = nullptr;
  c10::Allocator* previous = nullptr;
  std::atomic<bool> installed{false};
  std::atomic<bool> forked{false};
  bool tier_doomed = false;                    // the budget is closed; the tier goes with the last cell that needs it
  bool may_offload = true;                     // the policy allows the tier as a last resort
  uint32_t scanned_cells = 0, since_scan = 0;  // of the last look at what the program holds
  double link_seconds_per_byte = 0;            // to the tier and back, for what nobody ranked
  bool may_evict = true;                       // ... and recomputation
  bool verify = false;
  uint32_t sample = 64;  // one drop in so many keeps a checksum
  std::string tier_error;
  int search = -1;  // how malloc finds who leaves: MM_BY_*, or by rank (-1)
  int remap = MM_REMAP_FIRST;
  double price_per_byte = 1;  // of those ranked last

  // A thread in malloc without the GIL asks the daemon (ask_mu)
  std::mutex ask_mu;
  std::condition_variable answered_cv;
  uint64_t asked = 0, answered = 0, ask_bytes = 0, answer_bytes = 0;
  int daemon_fd = -1;

  // Guarded by mu
  Cell* oldest = nullptr;  // cells with handles
  Cell* newest = nullptr;
  std::vector<Cell*> armed;  // in the order in which they leave; entries may be stale (cell->armed == KEEP)
  size_t armed_next = 0;
  uint64_t armed_bytes = 0;
  std::atomic<bool> plan_short{false};  // malloc took all that the plan had for it, and needed more
  uint64_t handled_bytes = 0;           // present bytes of cells with handles
  uint64_t gone_bytes = 0;              // bytes of cells with handles that are gone
  uint64_t incoming_bytes = 0;          // prefetched, not asked for yet
  int64_t offloaded_cells = 0;
  uint64_t offloaded_bytes = 0;  // of them: gone, and the tier has them

  // Guarded by the GIL
  std::unordered_map<c10::StorageImpl*, Cell*> table;  // owns a reference to each cell
  size_t sweep_at = 4096, sweep_cursor = 0;
  size_t attached_bytes = 0;  // generator states and private copies that recipes were given since the last sweep
  std::vector<Written> unsettled;
  std::vector<Written> doubtful;  // written while saved: a moved counter makes them stale, else they have new bytes
  std::unordered_map<PyObject*, OpInfo*> ops;
  std::unordered_map<uint64_t, Kind*> kinds;
  std::vector<std::vector<int64_t>> environments;
  int64_t next_seq = 0;
  uint32_t pass = 1;           // counted by begin_pass()
  uint32_t saved_in_pass = 0;  // cells that this pass has saved so far
  double clock = 0;            // virtual time: the sum of the costs of recorded ops
  uint32_t stamp = 0;
  std::vector<Cell*> kept_large;     // large roots that recipes hold: looked at before every op, so they go in time
  uint64_t kept_new_bytes = 0;       // bytes of roots held for recipes since they were last looked through
  std::atomic<bool> watching{true};  // false asleep: what could leave is not known then
  bool always_rank = false;          // torture: after every op
  bool active = false;               // a budget is open
  bool tracing = false;              // see trace.cpp
  std::atomic<bool> detail{false};   // the telemetry has a reader or a log
  uint64_t events_since_rank = 0;
  uint64_t rank_backoff = 0;
  int64_t last_unpacked = 0;

  // Watermarks of what cannot leave (design §7: floor). Written by malloc under mu.
  std::atomic<uint64_t> floor_bytes{0};
  std::atomic<uint64_t> held_peak_bytes{0};
  std::atomic<uint64_t> held_estimate{0};  // bytes of cells with handles that the program holds too
  std::atomic<uint64_t> largest_request{0};
  std::atomic<uint64_t> bits_bytes{0};  // of evicted cells, counted as outside the arena

  PyObject* on_slow = nullptr;      // (func, types, args, kwargs, class)
  PyObject* on_new_kind = nullptr;  // (func, args, kwargs): first use of a kind
  PyObject* on_classify = nullptr;  // (func) -> (callable, class, mutates, seeded, written args, kwargs)
  PyObject* on_missing = nullptr;   // (cell): recompute it
  PyObject* on_rank = nullptr;      // ()
  PyObject* on_kept = nullptr;      // (): roots that only recipes hold may have grown too many
  PyObject* on_empty = nullptr;     // (bytes) -> bytes: the vault is empty
  PyObject* on_oom = nullptr;       // (): an op ended out of memory; raises BudgetError
  PyObject* on_retry = nullptr;     // () -> bool: an op found no memory; was anything freed?
  PyObject* mode_class = nullptr;   // of the open budget's modes
  PyObject* on_progress = nullptr;  // (seq): a handle was used while offloaded cells exist
  Counters n;
};

extern Shim g;
extern thread_local bool tl_no_reclaim;         // this thread's allocations fail rather than reclaim
extern thread_local bool tl_trial;              // they are a trial's, and say nothing about what the run needs
extern thread_local bool tl_recomputing;        // ... are a recomputation's
extern thread_local uint64_t tl_refused_floor;  // the budget that the recomputation which was refused last would need
extern thread_local int tl_side;                // where the op that runs allocates: MM_SIDE_*
extern thread_local bool tl_ask_daemon;         // false in the daemon itself
extern thread_local uint32_t tl_module;         // see watch.cpp
extern thread_local const Kind* tl_op;
extern thread_local uint32_t tl_op_module;
extern thread_local uint64_t tl_stall_ns;  // time that this thread spent in reclaim and reload
extern PyTypeObject CellType, RecipeType, RefType;

// Room that reads ahead leave free, and at which ranking ahead begins: what the running op may ask for. Needs the
// arena.
inline uint64_t reserve_bytes() {
  return std::max<uint64_t>(g.largest_request.load(std::memory_order_relaxed) * 3 / 2, mm_arena_budget(g.arena) / 32);
}

inline uint64_t mixed(uint64_t hash, uint64_t v) {
  hash = (hash ^ v) * 0x9E3779B185EBCA87ull;
  return hash ^ (hash >> 32);
}

inline StorageRef storage_of(const c10::TensorImpl* t) {
  return StorageRef::reclaim_copy(t->unsafe_storage().unsafeGetStorageImpl());
}

// A list or tuple like `sequence` of what `item` makes of its entries; null, as `item` left it, where it makes null.
template <class F>
PyObject* mapped(PyObject* sequence, F&& item) {
  const bool list = PyList_CheckExact(sequence);
  const Py_ssize_t n = PySequence_Fast_GET_SIZE(sequence);
  PyObject* copy = list ? PyList_New(n) : PyTuple_New(n);
  for (Py_ssize_t i = 0; copy && i < n; ++i) {
    PyObject* made = item(PySequence_Fast_GET_ITEM(sequence, i));
    if (!made) {
      Py_DECREF(copy);
      return nullptr;
    }
    if (list)
      PyList_SET_ITEM(copy, i, made);
    else
      PyTuple_SET_ITEM(copy, i, made);
  }
  return copy;
}

inline bool data_present(const c10::StorageImpl* s) {
  return const_cast<c10::StorageImpl*>(s)->_mutable_data_ptr_no_checks().get() != nullptr || s->nbytes() == 0;
}

// A moved-from DataPtr still shows its old address, so it is cleared by hand.
inline at::DataPtr take_incoming_locked(Cell* c) {
  at::DataPtr bytes = std::move(c->incoming);
  c->incoming.clear();
  if (bytes.get()) g.incoming_bytes -= std::min<uint64_t>(g.incoming_bytes, static_cast<uint64_t>(c->nbytes));
  return bytes;
}

// vault.cpp
int install_allocator();
void uninstall_allocator();
void arena_free(void* p);
void device_free(void* p);
void tell_profiler(mm_arena* arena, const at::Device& where, void* p, bool allocated);
bool counts_for_floor();
void raise_floor(uint64_t value);
bool foreign_memory(const c10::StorageImpl* s);
void expose_cell(Cell* c);
uint64_t release_from_vault(uint64_t want);
bool release_cell_locked(Cell* c, uint8_t action, std::unique_lock<std::mutex>& lock, bool force_clean_only);
bool ours_alone_locked(const Cell* c);
bool versions_current(const Cell* c);
bool saved_current(const Cell* c);
void disarm_locked(Cell* c);
void scan_floor(bool at_op_boundary);
bool can_evict(const Cell* c);
bool room_to_remake(const Cell* c);
uint64_t cancel_prefetches(uint64_t want, std::unique_lock<std::mutex>& lock);
uint64_t checksum_bytes(const void* p, size_t n);
uint64_t now_ns();
void close_doomed_tier();
void throw_out_of_memory(size_t bytes);

// bits.cpp
double bits_seconds(int64_t nbytes);
bool worth_bits(const Cell* c);
Bits* pack_bits(const void* from, int64_t nbytes);
void count_bits(const Bits* bits);
void end_bits(Bits* bits, bool counted);
extern PyMethodDef bits_functions[];

// device.cpp
enum StreamRule : uint32_t {
  RULE_USES = 1,
  RULE_UNPACKED = 2,
  RULE_REPLAYED = 4,
  RULE_EXPOSED = 8,
  RULE_FILLED = 16,
  RULE_FILLED_REPLAY = 32,
  RULE_PREFETCHED = 64,
  RULE_CHECKED = 128,
  RULE_ASLEEP = 256
};
bool rule_holds(StreamRule rule);
bool managed_here(const c10::StorageImpl* s);
c10::DispatchKeySet keys_of(c10::DeviceType type);
mm_stream stream_now();
void note_stream(c10::StorageImpl* s, StreamRule rule);
void note_streams(PyObject* args, PyObject* kwargs);
bool wait_for_filling(const c10::StorageImpl* s, mm_stream filled_on, StreamRule rule);
bool quiet_device();
bool checksum_of(const c10::Device& where, const void* p, size_t n, uint64_t* sum);
bool last_checksum_of(const c10::Device& where, const void* p, size_t n, uint64_t* sum);
at::DataPtr managed_block(size_t n);
StorageRef storage_copy(const c10::StorageImpl* from);
at::DataPtr try_block(size_t n, uint64_t keep_free, mm_stream home);
const char* out_of_memory_words();
bool on_cuda();
bool ours(const void* p);
void set_budget(uint64_t bytes);
int install_device_allocator();
void uninstall_device_allocator();

// traffic.cpp
void arm_locked(Cell* c, uint8_t action, bool by_plan);
void clear_armed_locked();
bool write_back_locked(Cell* c);
int begin_reload(Cell* c, uint64_t keep_free);

// plan.cpp
bool plan_leads();
bool plan_brings_back();
void plan_settle();
void plan_saved(Cell* c);
void plan_unpacked(const Cell* c);
void plan_late(const Cell* c);
void plan_let_go(const Cell* c);
extern PyMethodDef plan_methods[];

// window.cpp
void price_locked(Cell* c);
void unprice_locked(Cell* c);

// cells.cpp
Cell* find_cell(c10::TensorImpl* t);
Cell* lookup_cell(c10::TensorImpl* t);
bool is_plain(const c10::TensorImpl* t);
c10::TensorImpl* impl_of(PyObject* o);  // null when o is no tensor
PyObject* wrap(c10::intrusive_ptr<c10::TensorImpl> t);
c10::intrusive_ptr<c10::TensorImpl> tensor_of(const Ref* r, StorageRef storage);
c10::intrusive_ptr<c10::TensorImpl> byte_tensor(StorageRef storage);  // over all of it
PyObject* raise_oom(const std::string& text);                         // null
void settle();
bool bring_back(Cell* c, bool* recompute);  // false: Python error set
void deferred_decref(PyObject* o);
void sweep();
void sweep_a_little();

// watch.cpp
void note_event(Happening what, const Cell* c, uint64_t ns);
void note_stall(uint64_t bytes, uint64_t ns);
void note_place(PyObject* func);
void note_end_of_pass();
void forked_watch();
extern PyMethodDef watch_methods[];

// trace.cpp
bool traced_here();
PyObject* traced_op(PyObject* func, PyObject* types, PyObject* args, PyObject* kwargs);
void trace_saved(c10::TensorImpl* t, Cell* c);
void trace_used(Cell* c);
void trace_took(uint64_t ns);
extern PyMethodDef trace_methods[];

// replay.cpp
extern PyMethodDef replay_methods[];

// recorder.cpp
extern PyMethodDef recorder_methods[];
extern PyMethodDef cell_functions[];
extern PyMethodDef vault_methods[];
extern PyMethodDef window_methods[];

}  // namespace memmgr
