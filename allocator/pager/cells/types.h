// Cells: the storages that the pager manages, their residency, and the graph of the recipes that make their bytes.
//
// Words:
//   cell       one storage of the managed device, from its first op to its end. It is the context of the storage's
//              DataPtr: no table is needed to find it, and the deleter reports its end
//   resident   its bytes are in memory; absent: they are not, and the storage's pointer is null behind torch's trap
//   version    the bytes that a cell holds between two writes
//   recipe     the op and its arguments that made a version; a root has none
//   ghost      a version whose bytes have ended; its recipe may still make them for other recipes
//   orphan     a cell whose storage has ended while its bytes are needed; its version owns it
//   needed     a version without which absent bytes of another one could not be made
//   pin        its owner may have a pointer to the bytes: the cell does not move (rule 3)
//
// Locks: `graph_lock()` guards versions, recipes, kinds and the registry of cells. Under it no thread allocates managed
// memory, runs an op, copies bytes or takes the GIL. Residency changes by `Cell::state` alone: a thread that sets kBusy
// on a cell without pins owns its bytes until it clears kBusy.
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
#include "base/constants.h"
#include "base/lock.h"
#include "base/tensors.h"
#include "cells/file_range.h"
#include "memmgr/device.h"

namespace memmgr::pager {

class Pool;
struct OpInfo;
struct Kind;
struct Recipe;
struct Version;

// The home of memory for which no device queues work.
inline const mm_stream kNobodys = reinterpret_cast<mm_stream>(~uintptr_t{1});
// Bytes that have never been restored.
inline const mm_stream kNotFilled = reinterpret_cast<mm_stream>(~uintptr_t{0});

constexpr size_t kPurposes = kValues<Purpose>;

constexpr uintptr_t kLine = 64;  // bytes; a kernel may depend on an address's offset in a line

constexpr uint32_t kPinMask = 0x00FFFFFF;
constexpr uint32_t kDead = 1u << 29;  // the storage has ended
constexpr uint32_t kBusy = 1u << 30;  // a thread moves the bytes
constexpr uint32_t kAbsent = 1u << 31;

// The op that makes a cell, for reports. Null and 0: not known.
struct Maker {
  const OpInfo* op = nullptr;
  uint32_t line = 0;  // the number of a source line (base/source_lines.h)
};
// The origin of a cell. No decision depends on it.
struct Birth {
  const OpInfo* op = nullptr;  // null: no op made it
  uint32_t pass = 0;           // births.h
  uint32_t module = 0;         // set while torch's module hooks are in place (base/module_of_op.h)
  uint32_t line = 0;
  bool backward = false;  // made in a backward
  // Of a tensor that its op makes anew from an earlier result of its own, and larger each time:
  uint32_t times = 0;    // so often
  uint32_t since = 0;    // the pass of the first one
  uint32_t growths = 0;  // the passes in which it grew
  uint64_t grown = 0;    // bytes, since then
};

struct Cell {
  std::atomic<uint32_t> state{0};  // the number of pins, and the bits above
  std::atomic<uint64_t> last_touch{0};
  // No use of the bytes was queued after this time of the device's clock. Set wherever a pin or a move ends.
  std::atomic<uint64_t> used_at{device_time()};

  // Written when the cell begins.
  uint64_t nbytes = 0;
  uint64_t serial = 0;   // the order in which cells were made; used once
  Pool* pool = nullptr;  // the pool of the bytes
  bool small = false;    // counted and never paged: a recipe names it, or a reader has written to it
  uint8_t lead = 0;      // the offset of its address in a line of `kLine` bytes, the same after each restore (rule 1)
  Birth birth;

  // Read and written by the thread that has the cell busy or pinned.
  at::DataPtr bytes;              // owner of the memory; empty while absent
  mm_slot slot = -1;              // a copy in the tier of the current version; -1: none
  mm_slot writing OF_GRAPH = -1;  // a copy that is being written (transfer.cpp); -1: none
  bool reading OF_GRAPH = false;  // the bytes are being read ahead of need
  Absence absence = Absence::kNone;
  mm_bits bits{};                    // kPacked: the two values, and a bit for each element
  uint64_t bits_bytes OF_GRAPH = 0;  // bytes of the budget that the bits take; 0: not packed
  // Taken of the bytes before they are evicted.
  Checksum checksum;
  mm_stream home = kNobodys;                              // the stream on which the block was allocated
  std::atomic<mm_stream> filled_on{kNotFilled};           // the stream on which the bytes were restored
  std::atomic<mm_stream> waited_for_filling{kNotFilled};  // the last stream that waited for `filled_on`

  // Written under the graph's lock. Read without it by a thread that has the cell busy or pinned, or that reads again
  // under the lock.
  MappedRange* range = nullptr;  // owned; null: its storage was not mapped from a file
  Escape escape = Escape::kNone;
  bool newborn = false;    // uninitialized: foreign code may write to it without a declaration (rule 3)
  bool outside = false;    // its memory is not the pool's
  bool root = false;       // counted among root_bytes
  bool given_up = false;   // a budget that has ended could not restore it, and has reported that
  uint16_t long_pins = 0;  // of works, of DDP's reducer, of `memmgr.pin` and of readers that outlive their call

  WeakStorage storage OF_GRAPH{StoragePtr()};  // empty: an orphan
  Version* version OF_GRAPH = nullptr;         // counted, except for an orphan's
  uint64_t name OF_GRAPH = 0;                  // its claim (names.h); 0: there is none
  size_t index OF_GRAPH = 0;                   // place in the registry
  uint8_t standing_pins OF_GRAPH = 0;          // pins of an escape and of a newborn, part of the pins
  uint16_t maker OF_GRAPH = 0;                 // of a newborn: the number of the thread that made it
  bool kept OF_GRAPH = false;                  // an orphan that recipes keep by value
  // The call of a compiled graph that has allocated it without an op (tl_compiled_graph); 0: there is none. Until
  // that call ends no foreign code has the cell, so an uninitialized version of it has no bytes that count.
  uint64_t blank_in OF_GRAPH = 0;
  Purpose purpose OF_GRAPH = Purpose::kOther;
  uint64_t moved_bytes OF_GRAPH = 0;  // over the link, both ways; kept here because the purpose may be set later
  int32_t queued_at OF_GRAPH = -1;    // place among the victims (victims.cpp); -1: not queued
  uint32_t period OF_GRAPH = 0;       // the last period that touched it, and its ordinal there (timeline.cpp)
  uint32_t ordinal OF_GRAPH = 0;
  uint32_t in_turn OF_GRAPH = 0;  // the place of its next touch, from 1 on; 0: not known (access_order.cpp)

  // The cell's last eviction. No decision depends on it.
  EvictedFor evicted_for OF_GRAPH = EvictedFor::kNone;
  uint32_t evicted_in_pass OF_GRAPH = 0;  // births.h

  bool counted_as_long_pinned OF_GRAPH = false;  // counted among long_pinned_bytes

  bool resident() const { return !(state.load(std::memory_order_acquire) & (kAbsent | kBusy)); }
};

inline bool in_mapping(const Cell* c) { return c->range && c->bytes.get() == c->range->begin; }
// True: its copy in the tier is the file itself.
inline bool has_file_copy(const Cell* c) { return c->range && c->slot >= 0 && c->slot == c->range->lent; }

// One version of a cell's bytes.
struct Version {
  uint32_t refs OF_GRAPH = 1;
  uint32_t needed OF_GRAPH = 0;
  Cell* cell OF_GRAPH = nullptr;    // holds, or held, the bytes; null: a ghost
  bool evicted OF_GRAPH = false;    // the cell's storage lives, and only the recipe can make its bytes
  bool temporary OF_GRAPH = false;  // a ghost that was rematerialized for other recipes; its bytes are freed after that
  bool kept OF_GRAPH = false;       // temporary; its bytes are kept for its group or a later one (rematerialize.cpp)
  bool uninitialized OF_GRAPH = false;
  bool presumed OF_GRAPH = false;  // a measuring run presumes that its op can run again: the next step will check that
  Recipe* recipe OF_GRAPH = nullptr;  // counted
  uint16_t depth OF_GRAPH = 0;
  uint64_t nbytes = 0;           // written when it begins
  uint32_t period OF_GRAPH = 0;  // of a ghost: the last period that touched its cell, and the ordinal there
  uint32_t ordinal OF_GRAPH = 0;
  bool lost OF_GRAPH = false;                     // a ghost that no recipe can make
  c10::SmallVector<Recipe*, 2> readers OF_GRAPH;  // the recipes that name it
};

enum class ArgumentRole : uint8_t {
  kRead,
  kWritten,  // the op writes to it: a private copy
  kFresh,    // the op writes to all of it without reading
  kValue,    // a number: its bytes are in the recipe
  kShape,    // only its geometry is read
  kAlias,    // of a compiled kernel: a view of the storage of an argument that is written, the one at `element`
};

struct TensorArg {
  TensorArg() {}  // otherwise emplace_back() would fill it with zeros first
  uint16_t argument = 0;
  int32_t element = -1;  // in a list; kAlias: the index in Recipe::tensors
  ArgumentRole role = ArgumentRole::kRead;
  Version* version = nullptr;  // counted; null for kFresh and kValue
  uint64_t storage_bytes = 0;
  c10::SmallVector<int64_t, 5> sizes;
  c10::SmallVector<int64_t, 5> strides;
  int64_t offset = 0;
  caffe2::TypeMeta dtype;
  c10::Device device{c10::DeviceType::CPU};
  c10::DispatchKeySet keys;
  bool wrapped_number = false;
  alignas(16) char value[16] = {};  // aligned as malloc aligns: kernels of complex numbers rely on it
};

constexpr uint16_t kLongestChain = 512;

struct Recipe {
  uint32_t refs OF_GRAPH = 0;  // of the versions that it makes and of the threads that run it
  OpInfo* info = nullptr;
  Kind* kind = nullptr;
  c10::DispatchKeySet keys;               // below the pager's key, as the op was called
  c10::SmallVector<c10::IValue, 6> args;  // without tensors
  c10::SmallVector<TensorArg, 2> tensors;
  c10::SmallVector<Version*, 2> outputs OF_GRAPH;  // not counted; null: the version has ended, or has another recipe
  at::Generator rng;  // a copy in the state before the op drew; undefined: it draws no numbers
  int numerics = 0;
  double seconds = -1;  // of its run, where its signature stands for many sizes; below 0: not known
  uint32_t module = 0;  // the module that ran, recorded while events are watched (introspection.h)
  uint16_t depth = 1;
  bool broken OF_GRAPH = false;  // an input is lost
  // Its signature, or one of its chain, was not checked for determinism: its outputs are compared with their checksums
  // when they are restored.
  bool checked = false;
  // True: the op fills its output with one value, without gradient. The output will be written, as an optimizer's
  // states are.
  bool filled = false;
  uint64_t bytes OF_GRAPH = 0;  // its own cost, once it counts in recipe_bytes
};

}  // namespace memmgr::pager
