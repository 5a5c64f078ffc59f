// Cells: the storages that the pager manages, their residency, and the graph of what made their bytes.
//
// Words:
//   cell       one storage of the managed device, from its first op to its end. It hangs on the storage's DataPtr, as
//              that one's context: finding it takes no table, and its end is told by the deleter
//   resident   its bytes are in memory; absent: they are not, and the storage's pointer is null behind torch's trap
//   version    the bytes that a cell holds between two writes
//   recipe     the op and its arguments that made a version; a root has none
//   ghost      a version whose bytes are gone for good; its recipe may still make them for others
//   orphan     a cell whose storage has died while its bytes are needed; its version owns it
//   needed     a version that somebody's bytes can be made from only while it can be had
//   pin        whoever has one may hold a pointer to the bytes: the cell stays where it is (rule 3)
//
// Locks: `graph_lock()` guards versions, recipes, kinds and the registry of cells. Nobody allocates managed memory,
// runs an op, copies bytes or takes the GIL under it. Residency changes hands by `Cell::state` alone: whoever sets
// kBusy on a cell without pins owns its bytes until it clears kBusy.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/StorageImpl.h>
#include <torch/headeronly/version.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <vector>

#include "base/budget.h"
#include "base/checksum.h"
#include "base/latest.h"
#include "guards/mapped_files.h"
#include "memmgr/device.h"

namespace memmgr::pager {

using StoragePtr = c10::intrusive_ptr<c10::StorageImpl>;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

class Pool;
struct Recipe;
struct Version;

// Memory that no device queues for.
inline const mm_stream kNobodys = reinterpret_cast<mm_stream>(~uintptr_t{1});
// Bytes that were there from the beginning.
inline const mm_stream kNotFilled = reinterpret_cast<mm_stream>(~uintptr_t{0});

// Where the bytes of an absent cell are.
enum class Absence : uint8_t { kNone, kOffloaded, kEvicted, kPacked };

// Why an address may not change any more (rule 9).
enum class Escape : uint8_t { kNone, kPointer, kNumpy, kDlpack, kShared, kSlice, kForeignWrite, kCaptured, kSizes };

// What the program has a cell for, as far as it was said (set_purpose); kOther: activations, and what nobody asked
// about.
enum class Purpose : uint8_t { kOther, kParameter, kGradient, kOptimizerState };
constexpr size_t kPurposes = 4;

constexpr uintptr_t kLine = 64;  // kernels may ask how an address lies in it

constexpr uint32_t kPinMask = 0x00FFFFFF;
constexpr uint32_t kDead = 1u << 29;  // the storage has died
constexpr uint32_t kBusy = 1u << 30;  // somebody moves the bytes
constexpr uint32_t kAbsent = 1u << 31;

// What the clock of a device's marks says (memmgr/device.h): work that is queued by now is older than any later mark.
extern const uint64_t* const device_clock;
inline uint64_t device_time() { return __atomic_load_n(device_clock, __ATOMIC_ACQUIRE); }

struct Cell {
  std::atomic<uint32_t> state{0};  // pins, and the bits above
  std::atomic<uint64_t> last_touch{0};
  // No use of the bytes was queued later than at this time of the device's clock. Set wherever a pin or a move ends.
  std::atomic<uint64_t> used_at{device_time()};
  uint64_t nbytes = 0;
  uint64_t serial = 0;   // of the order in which cells were made; used once
  Pool* pool = nullptr;  // that the bytes come from

  // Whoever has the cell busy or pinned reads and writes these.
  at::DataPtr bytes;     // what frees the memory; empty while absent
  mm_slot slot = -1;     // a copy below that is true to the bytes
  mm_slot writing = -1;  // one that is being made (transfer.cpp; under the graph's lock)
  bool reading = false;  // its bytes are on their way back, ahead of need (the same)
  Absence absence = Absence::kNone;
  mm_bits bits{};           // kPacked: its two values, and where each is
  uint64_t bits_bytes = 0;  // that they take of the budget; 0: there are none
  // Of the bytes as they left.
  Checksum checksum;
  mm_stream home = kNobodys;                              // in whose order the block was allocated
  std::atomic<mm_stream> filled_on{kNotFilled};           // in whose order they came back
  std::atomic<mm_stream> waited_for_filling{kNotFilled};  // who has waited for that last

  // Under the graph's lock.
  WeakStorage storage{StoragePtr()};  // empty: an orphan
  Version* version = nullptr;         // counted, but for an orphan's
  MappedRange* range = nullptr;       // owned; null: its storage was not mapped from a file
  uint64_t name = 0;                  // its claim (names.h); 0: there is none
  size_t index = 0;                   // in the registry
  uint8_t standing_pins = 0;          // of an escape and of a newborn, part of the pins
  Escape escape = Escape::kNone;
  bool newborn = false;   // nobody has written to it yet: foreign code may, without telling (rule 3)
  uint16_t maker = 0;     // the number of the thread that made it, of a newborn
  uint8_t lead = 0;       // where in a line of `kLine` bytes its address lies, everywhere that it comes back (rule 1)
  bool outside = false;   // its memory is not the pool's
  bool root = false;      // counted among root_bytes
  bool small = false;     // counted, never paged: it is a cell only because a recipe names it
  bool kept = false;      // an orphan that recipes keep by value
  bool given_up = false;  // a budget that has ended could not bring it back, and has said so
  Purpose purpose = Purpose::kOther;
  uint64_t moved_bytes = 0;  // over the link, both ways: whose they are may be said after they moved
  int32_t queued_at = -1;    // among the victims (victims.cpp)
  uint32_t period = 0;       // in which the timeline met it last, and its number there (timeline.cpp)
  uint32_t ordinal = 0;
  uint32_t in_turn = 0;  // where it is touched next, in places from 1 on; 0: not known (access_order.cpp)

  uint16_t held = 0;             // pins of works, of DDP's reducer and of readers that outlive their call
  bool counted_as_held = false;  // counted among held_bytes

  bool resident() const { return !(state.load(std::memory_order_acquire) & (kAbsent | kBusy)); }
};

inline bool in_mapping(const Cell* c) { return c->range && c->bytes.get() == c->range->begin; }
// Its copy below is the file itself.
inline bool has_file_copy(const Cell* c) { return c->range && c->slot >= 0 && c->slot == c->range->lent; }

// One version of a cell's bytes. Guarded by the graph's lock, and so is the count.
struct Version {
  uint32_t refs = 1;
  uint32_t needed = 0;
  Cell* cell = nullptr;    // that holds, or held, the bytes; null: a ghost
  bool evicted = false;    // the cell's storage lives, its bytes can only be made again
  bool temporary = false;  // a ghost that a rematerialization has made for others; its bytes end with that
  bool kept = false;       // and they stay until a group of them is done (rematerialize.cpp)
  bool uninitialized = false;
  bool presumed = false;     // by a run that measures: the next step will try how it is made
  Recipe* recipe = nullptr;  // counted
  uint16_t depth = 0;
  uint64_t nbytes = 0;
  uint32_t period = 0;  // of a ghost: the timeline's that its cell was in last, and its number there
  uint32_t ordinal = 0;
  bool lost = false;                     // a ghost that nothing can make any more
  c10::SmallVector<Recipe*, 2> readers;  // the recipes that name it
};

std::mutex& graph_lock();

// Cells and versions come and go with every recorded op, always under the graph's lock: whose memory is here is the
// next one's. Malloc and free took a fifteenth of such an op.
template <class T>
class Recycled {
 public:
  T* make_locked() {
    if (spare_.empty()) return new T;
    T* t = spare_.back();
    spare_.pop_back();
    return new (t) T;
  }
  void end_locked(T* t) {
    if (spare_.size() == kMost) {
      delete t;
      return;
    }
    t->~T();
    spare_.push_back(t);
  }

 private:
  static constexpr size_t kMost = 4096;
  std::vector<T*> spare_;
};
Recycled<Cell>& cell_memory();
Recycled<Version>& version_memory();

std::condition_variable& residency_changed();  // told whenever a cell stops being busy; waits on graph_lock()

// Bytes and other things that must end outside of the lock.
struct Trash {
  c10::SmallVector<at::DataPtr, 2> bytes;
  c10::SmallVector<mm_slot, 2> slots;  // first: one that is being written reads the bytes
  std::vector<std::unique_ptr<MappedRange>> ranges;
  void end();
  ~Trash() { end(); }
};

// ---- storages and their cells ----

extern "C" void memmgr_pager_end_of_storage(void* cell);

inline at::DataPtr& pointer_of(const c10::StorageImpl* s) {
  return const_cast<c10::StorageImpl*>(s)->_mutable_data_ptr_no_checks();
}

inline Cell* cell_of(const c10::StorageImpl* s) {
  const at::DataPtr& p = pointer_of(s);
  return p.get_deleter() == &memmgr_pager_end_of_storage ? static_cast<Cell*>(p.get_context()) : nullptr;
}

// True if this storage may become a cell: its memory is the pool's, the default allocator's of torch, or a private
// mapping, and no other library has it.
bool adoptable(const c10::StorageImpl* s);
// Too small to be paged, or without bytes: its size is a symbol.
inline bool is_small(const c10::StorageImpl* s) {
  return s->sym_nbytes().is_heap_allocated() || s->nbytes() < budget.options.small_bytes;
}
// Storages remember who gave them their first bytes, and would ask torch's allocator for more.
void grows_in_pool(c10::StorageImpl* s);
// Makes it one, if it is not; the address stays. Takes the lock. Null where that cannot be.
// A new cell begins with so many pins.
Cell* adopt(c10::StorageImpl* s, uint32_t pins = 0);
Cell* adopt_locked(c10::StorageImpl* s, uint32_t pins, uint64_t touched_ticks, bool known_adoptable = false);
// The storage has its own pointer again and no cell. The cell is resident and nobody else uses it. The GIL is held.
void unadopt(Cell* c);
// Shows the storage where its bytes are, with the trap off; null: nowhere, with the trap on (rule 2). Whoever calls
// this has the cell busy.
void show_bytes(c10::StorageImpl* s, void* data, const Cell* c);
// A write that no op announces is told from here on (2.13's materializer; before that there is none). The caller has a
// pin.
void watch_writes(const Cell* c);
void unwatch_writes(c10::StorageImpl* s);
// What such a write calls: escape.cpp.
void foreign_write(c10::StorageImpl* s);
// The id in a trap's message, 0 if the text is no trap's.
uint64_t trapped_cell(const char* what);

// ---- the registry ----

size_t count_cells_locked();
// Bytes that moved over the link since the budget opened, of cells that have ended, by purpose.
extern uint64_t moved_by_ended[kPurposes];
void forget_moved();  // a budget opens
Cell* cell_at_locked(size_t index);
template <class F>
void for_each_cell_locked(F&& visit) {
  for (size_t i = count_cells_locked(); i-- > 0;) visit(cell_at_locked(i));
}

// ---- pins ----

// True: the bytes are there. False: the pin holds, but somebody has to bring them back.
inline bool pin(Cell* c, uint64_t now) {
  const uint32_t before = c->state.fetch_add(1, std::memory_order_acquire);
  c->last_touch.store(now, std::memory_order_relaxed);
  return !(before & (kAbsent | kBusy));
}
// For whoever knows the cell by a version and not by its storage: false where the storage has died, since the one who
// ends the cell is then on his way.
bool pin_living_locked(Cell* c, uint64_t now);
void last_user_is_gone(Cell* c);
inline void note_used(Cell* c) { raise_to(c->used_at, device_time()); }
inline void unpin(Cell* c) {
  note_used(c);
  const uint32_t before = c->state.fetch_sub(1, std::memory_order_acq_rel);
  if (C10_UNLIKELY((before & kDead) && (before & kPinMask) == 1 && !(before & kBusy))) last_user_is_gone(c);
}
inline bool begin_move(Cell* c) {  // of what nobody has pinned
  uint32_t expected = 0;
  return c->state.compare_exchange_strong(expected, kBusy, std::memory_order_acq_rel);
}
// Clears kBusy, sets or clears kAbsent, wakes who waits.
void end_move(Cell* c, bool absent);
bool end_move_locked(Cell* c, bool absent);  // true: call last_user_is_gone() once the lock is free
// What a packed cell has beside it: counted, or not any more. The caller has it busy.
void count_bits_locked(Cell* c, uint64_t nbytes);
void end_bits_locked(Cell* c);
// The bytes of a cell that the caller has busy are here; ends the move, too.
// `filled_on`: in whose order they are written.
bool come_back_locked(Cell* c, at::DataPtr bytes, mm_stream filled_on, Trash* trash);
// The opposite, for a cell whose absence is set: the storage has no bytes any more. Returns the owner of their memory;
// it is empty if they lie in a mapping, whose pages the caller drops. The move goes on. `s` is null for an orphan.
at::DataPtr go_away_locked(Cell* c, c10::StorageImpl* s);
// Memory of the pool for its bytes, where they lie in a line as they did before.
at::DataPtr allocate_for(const Cell* c);
at::DataPtr try_allocate_for(const Cell* c, uint64_t keep_free);
// The block of the pool that its bytes are in.
inline const void* block_of(const Cell* c) { return c->bytes.get_context(); }

void stand_pinned_locked(Cell* c);    // one standing pin more
void stand_unpinned_locked(Cell* c);  // one less
// A pin that outlives the op or call that took it: it counts in the floor. The caller has pinned, and unpins after.
void begin_held_locked(Cell* c);
void end_held_locked(Cell* c);
void count_held_locked(Cell* c);  // whether it stays for another reason may have changed
// Nobody has written to it yet; it stays until an op has touched it (rule 3).
void begin_newborn_locked(Cell* c);
void end_newborn_locked(Cell* c);
// Do other threads have some? They have only to go on, and these can leave.
bool others_have_newborns();

// Whether it is a root may have changed.
void count_root_locked(Cell* c);
// What is made from now on has serials from here.
uint64_t serial_of_next_locked();

// ---- versions ----

void release_version_locked(Version* v, Trash* trash);
void release_recipe_locked(Recipe* r, Trash* trash);
bool has_bytes_locked(const Version* v);
// Can its bytes be had: are they somewhere, or can its recipe make them?
bool available_locked(const Version* v);
// Called whenever bytes or a recipe have gone: tells whoever could be made from `v` that they cannot any more.
void check_lost_locked(Version* v);
// A ghost has bytes for a while, as an orphan that may be offloaded; and has none again.
void lend_bytes_locked(Version* v, at::DataPtr bytes);
void end_loan_locked(Version* v, Trash* trash);
void need_locked(Version* v);
void unneed_locked(Version* v, Trash* trash);
// The cell's bytes are gone, or back: what its recipe reads is needed, or not any more.
void set_evicted_locked(Version* v, bool evicted, Trash* trash);
// The cell has new bytes from here on, of unknown making. The old version becomes a ghost; whoever needs it has been
// given its bytes before (see settle_before_write).
Version* new_version_locked(Cell* c, Trash* trash);
// Before the bytes of `c` change: what is needed of them is kept as an orphan's copy (rule 4). Allocates; no lock held.
void settle_before_write(Cell* c);
// Both, so that nobody comes to need the old bytes in between; and the copy below is void.
void begin_new_version(Cell* c);
// The copy below is not true to the bytes any more.
void drop_slot(Cell* c);
void forget_recipe_locked(Version* v, Trash* trash);

// Bytes of resident cells that are not small, for admission and figures.
extern SumUnderLock resident_cell_bytes;
extern SumUnderLock root_bytes;  // of cells that nothing can make again: without a tier they stay
extern SumUnderLock escaped_bytes;
extern SumUnderLock newborn_bytes;
extern SumUnderLock recipe_bytes;  // all of them, and what is kept for them
extern SumUnderLock held_bytes;    // of cells whose pin outlives an op, and that stay for no other reason
extern std::atomic<int64_t> absent_cells;

}  // namespace memmgr::pager
