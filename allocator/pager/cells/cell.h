// Functions on single cells: their registry, totals, blocks and standing pins (types.h has the words).
#pragma once

#include <vector>

#include "base/clock.h"
#include "base/deferred_drop.h"
#include "base/latest.h"
#include "base/lock.h"
#include "base/session.h"
#include "base/tensors.h"
#include "cells/file_range.h"
#include "cells/types.h"

namespace memmgr::pager {

// Cells and versions are made and ended with every recorded op, always under the graph's lock. The memory of one that
// has ended is reused for the next one. Malloc and free took a fifteenth of such an op.
template <class T>
class Recycled {
 public:
  T* make_locked() REQUIRES(graph_lock()) {
    if (spare_.empty()) return new T;
    T* t = spare_.back();
    spare_.pop_back();
    return new (t) T;
  }
  void end_locked(T* t) REQUIRES(graph_lock()) {
    if (spare_.size() == kMost) {
      delete t;
      return;
    }
    t->~T();
    spare_.push_back(t);
  }

 private:
#ifdef __SANITIZE_ADDRESS__
  static constexpr size_t kMost = 0;  // so that a use after the end is found
#else
  static constexpr size_t kMost = 4096;
#endif
  std::vector<T*> spare_;
};
Recycled<Cell>& cell_memory() REQUIRES(graph_lock());
Recycled<Version>& version_memory() REQUIRES(graph_lock());

Condition& residency_changed();  // notified whenever a cell stops being busy; waits on graph_lock()

// Bytes and other things that have to end outside of the lock.
struct Trash {
  struct Slot {
    const Session* session;
    mm_slot slot;
  };
  c10::SmallVector<at::DataPtr, 2> bytes;
  c10::SmallVector<Slot, 2> slots;  // freed first: a slot that is being written reads the bytes
  std::vector<std::unique_ptr<MappedRange>> ranges;
  // Takes a slot that the cell has had in the tier.
  C10_NOINLINE void add_slot(const Cell* c, mm_slot slot);
  void end();
  ~Trash() { end(); }
};

// ---- storages and their cells ----

// The deleter of a cell's DataPtr. It calls on_end_of_storage.
extern "C" void memmgr_pager_end_of_storage(void* cell);
extern void (*on_end_of_storage)(Cell* c);  // lifetime.cpp

inline Cell* cell_of(const c10::StorageImpl* s) {
  const at::DataPtr& p = pointer_of(s);
  return p.get_deleter() == &memmgr_pager_end_of_storage ? static_cast<Cell*>(p.get_context()) : nullptr;
}

// True: the storage is too small to be paged, or has no bytes: its size is a symbol.
inline bool is_small(const Options& options, const c10::StorageImpl* s) {
  return s->sym_nbytes().is_heap_allocated() || s->nbytes() < options.small_bytes;
}
// ---- the registry ----

void register_locked(Cell* c) REQUIRES(graph_lock());
void unregister_locked(Cell* c) REQUIRES(graph_lock());
// Functions of higher layers that keep pointers to cells. Each is called under the graph's lock.
struct CellListener {
  void (*storage_died)(const Cell* c) = nullptr;  // the cell may live on as an orphan
  void (*ended)(Cell* c) = nullptr;               // the cell is being removed from the registry
};
struct ListensToCells {  // for the life of the process
  explicit ListensToCells(CellListener listener);
};
void tell_storage_died_locked(const Cell* c) REQUIRES(graph_lock());

size_t count_cells_locked() REQUIRES(graph_lock());
void forget_moved();  // when a budget opens
Cell* cell_at_locked(size_t index) REQUIRES(graph_lock());
template <class F>
void for_each_cell_locked(F&& visit) REQUIRES(graph_lock()) {
  for (size_t i = count_cells_locked(); i-- > 0;) visit(cell_at_locked(i));
}

inline StoragePtr hold(const Cell* c) REQUIRES(graph_lock()) { return hold_storage(c->storage); }

// ---- moves ----

inline void note_used(Cell* c) { raise_to(c->used_at, device_time()); }
inline bool begin_move(Cell* c) {  // for a cell without pins
  uint32_t expected = 0;
  return c->state.compare_exchange_strong(expected, kBusy, std::memory_order_acq_rel);
}
// Adds the bytes of a packed cell's bits to the totals, or frees them. The caller has the cell busy.
void count_bits_locked(Cell* c, uint64_t nbytes) REQUIRES(graph_lock());
void end_bits_locked(Cell* c) REQUIRES(graph_lock());

// Allocates memory of the pool for the cell's bytes, with the same offset in a line as before.
at::DataPtr allocate_for(const Cell* c);
at::DataPtr try_allocate_for(const Cell* c, uint64_t keep_free);
// Returns the block of the pool that has the cell's bytes.
inline const void* block_of(const Cell* c) { return c->bytes.get_context(); }

void stand_pinned_locked(Cell* c) REQUIRES(graph_lock());    // adds a standing pin
void stand_unpinned_locked(Cell* c) REQUIRES(graph_lock());  // ends one
// A pin that outlives its op or call, and counts in the floor. The caller pins before, and unpins after.
void begin_long_pin_locked(Cell* c) REQUIRES(graph_lock());
void end_long_pin_locked(Cell* c) REQUIRES(graph_lock());
void count_long_pinned_locked(Cell* c)
    REQUIRES(graph_lock());  // called when another reason to keep the cell may have begun or ended
// The cell is uninitialized: it is pinned until an op has touched it (rule 3).
void begin_newborn_locked(Cell* c) REQUIRES(graph_lock());
void end_newborn_locked(Cell* c) REQUIRES(graph_lock());
// Returns true for a buffer that this call of a compiled graph has allocated, and that nothing has touched since.
bool is_blank(const Cell* c) NOT_ANALYZED;  // no other thread writes to such a cell
// Returns true if other threads have newborns. Those can be evicted once their threads go on.
bool others_have_newborns();
// Tells if another thread's newborn may free room soon, by the tries of an op so far. A newborn that ends frees
// its room only a moment later, when its thread gives back the bytes; that may take some pauses.
class SeenNewborns {
  static constexpr int kTriesAfter = 4;

 public:
  // Called before a try.
  void look() { since_ = others_have_newborns() ? 0 : since_ + 1; }
  bool may_free_room() const { return since_ < kTriesAfter || others_have_newborns(); }

 private:
  int since_ = kTriesAfter;  // tries since the last one that began with newborns
};

// Called when the cell may have become a root, or may be one no longer.
void count_root_locked(Cell* c) REQUIRES(graph_lock());
// Returns the serial of the next cell to be made.
uint64_t serial_of_next_locked() REQUIRES(graph_lock());
uint64_t next_serial_locked() REQUIRES(graph_lock());  // takes it
// Small cells that live for recipes alone count as recipe bytes (rule 5).
constexpr uint64_t kLeastRecipeBytes = 4 << 20;  // room enough for a small model's recipes
uint64_t recipe_bytes_limit(const Session& session);
bool room_for_kept(const Cell* c);
void keep_locked(Cell* c) REQUIRES(graph_lock());
// Ends the standing pins of the escape and the newborn with the storage.
void unstand_all_locked(Cell* c) REQUIRES(graph_lock());

// Sums over cells and recipes.
struct Totals {
  SumUnderLock resident_cell_bytes;  // of resident cells that are not small, for admission and figures
  SumUnderLock root_bytes;           // of cells without a recipe: without a tier they cannot be evicted
  SumUnderLock escaped_bytes;
  SumUnderLock newborn_bytes;
  SumUnderLock recipe_bytes;       // of all recipes, and of the values kept for them
  SumUnderLock long_pinned_bytes;  // of cells with a long pin that no other reason keeps resident
  std::atomic<int64_t> absent_cells{0};
  // Bytes that moved over the link since the budget opened, of cells that have ended, by purpose.
  uint64_t moved_by_ended[kPurposes] OF_GRAPH = {};
};
extern Totals totals;

}  // namespace memmgr::pager
