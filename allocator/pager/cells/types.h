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

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/StorageImpl.h>
#include <torch/headeronly/version.h>

#include <atomic>
#include <optional>
#include <vector>

#include "base/checksum.h"
#include "base/clock.h"
#include "base/tensors.h"
#include "cells/file_range.h"
#include "memmgr/device.h"

namespace memmgr::pager {

class Pool;
struct OpInfo;
struct Kind;
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

enum class Role : uint8_t {
  kRead,
  kWritten,  // the op writes to it: a private copy
  kFresh,    // the op writes to all of it without reading
  kValue,    // a number: its bytes are in the recipe
  kShape,    // only its geometry is read
};

struct TensorArg {
  TensorArg() {}  // else emplace_back() would fill it with zeros first
  uint16_t argument = 0;
  int32_t element = -1;  // in a list
  Role role = Role::kRead;
  Version* version = nullptr;  // counted; null for kFresh and kValue
  uint64_t storage_bytes = 0;
  c10::SmallVector<int64_t, 5> sizes;
  c10::SmallVector<int64_t, 5> strides;
  int64_t offset = 0;
  caffe2::TypeMeta dtype;
  c10::Device device{c10::DeviceType::CPU};
  c10::DispatchKeySet keys;
  bool wrapped_number = false;
  alignas(16) char value[16] = {};  // as malloc has it: kernels of complex numbers rely on that
};

constexpr uint16_t kLongestChain = 512;

struct Recipe {
  uint32_t refs = 0;  // versions that it makes, and who runs it; guarded by the graph's lock
  OpInfo* info = nullptr;
  Kind* kind = nullptr;
  c10::DispatchKeySet keys;               // below ours, as the op was called
  c10::SmallVector<c10::IValue, 6> args;  // tensors left out
  c10::SmallVector<TensorArg, 2> tensors;
  c10::SmallVector<Version*, 2> outputs;  // not counted; null: nobody wants it
  at::Generator rng;                      // a copy, in the state before the op drew; undefined: it draws nothing
  int numerics = 0;
  double seconds = -1;  // of its run, where its kind stands for many sizes
  uint32_t module = 0;  // that was running, while somebody looks (introspection.h)
  uint16_t depth = 1;
  bool broken = false;  // something that it reads is lost
  // Its kind, or that of something in its chain, was not tried: what it makes meets its checksum when it comes back.
  bool checked = false;
  bool filled = false;  // without gradient, with one value: it will be written, as an optimizer's states are
  uint64_t bytes = 0;   // that it costs by itself, once it counts among recipe_bytes
};

}  // namespace memmgr::pager
