// The properties of an op, by its name and schema: the arguments that it touches and writes, and if it can be run
// again.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <Python.h>
#include <c10/util/ArrayRef.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "base/source_lines.h"
#include "base/thread_state.h"
#include "cells/types.h"

namespace memmgr::pager {

enum class OpClass : uint8_t {
  kOrdinary,   // reads its tensors
  kView,       // only aliases its tensors: no bytes are needed for a shape
  kMetadata,   // reads the geometry of its tensors, never their bytes
  kComposite,  // calls other ops, which are seen
  kForeign,    // not torch's: it and the ops inside it are paged, and it may write without a declaration (rule 4)
};

// The arguments whose addresses a composite takes before it runs ops or writes (rule 9).
//   kIndices  the integers among them
//   kAll      all
//   kWeights  the integers, and on an accelerator also the lists of tensors: before cuDNN's RNNs torch compares
//             the addresses of the weights with those in one buffer
enum class RawReads : uint8_t { kNone, kIndices, kAll, kWeights };

struct RawReader {
  const char* name;  // in aten
  RawReads reads;
  bool on_cpu = true;  // also on the CPU
};
c10::ArrayRef<RawReader> raw_readers();

namespace facts {
struct NamedOp;
}

struct OpInfo {
  c10::OperatorHandle op;
  c10::OperatorName called;  // a copy, since the op may end before the tensors that it has made
  std::string kernel;        // the name of a compiled graph's kernel (launch.h), whose `op` is not used; empty: an op
  // The kernel's function in C, with addresses and integers as arguments, or the `run` of a Triton kernel in Python,
  // with tensors and integers; `run` is read with the GIL. Both null: its launches have no recipe.
  std::atomic<void*> function{nullptr};
  std::atomic<PyObject*> run{nullptr};
  OpClass kind = OpClass::kOrdinary;
  bool torchs = false;         // aten or prims
  bool recordable = false;     // aten or prims, functional or with one declared write, nothing hidden
  bool seeded = false;         // draws random numbers
  bool uninitialized = false;  // its outputs are uninitialized
  bool overwriter = false;     // writes its first argument without reading it
  bool pointwise = false;      // each element of its result depends on the same element of its tensors
  bool fills = false;          // fills its outputs with one value, and reads no bytes
  bool storage_op = false;     // changes a tensor's storage, or its length
  bool reads_hardly = false;   // reads one element of a tensor at most: as a number, or it only changes the storage
  bool lazy_clone = false;
  bool list_op = false;       // may run in slices (list_ops.h)
  bool nested = false;        // its arguments or results may be the sizes of nested tensors
  bool collective = false;    // of c10d: it returns a Work
  bool tells_stream = false;  // reports to the allocator that a stream uses the block
  RawReads reads_raw = RawReads::kNone;
  bool native = false;             // not torch's, with a C++ kernel: it may keep addresses
  bool keeps = false;              // it may also read arguments of earlier calls
  bool only_reads = false;         // torch's own outside aten, without a write or a message: ops of packed weights
  bool adds_in_any_order = false;  // on accelerators
  bool races = false;              // on the CPU
  int in_order_unless = -1;        // position of the argument that must be true for any order; -1: none
  int generator = -1;              // position of the generator
  int running_mean = -1, running_var = -1, training = -1;  // undeclared writes of batch norm
  bool always_training = false;                            // it has no argument `training`
  std::vector<uint8_t> may_hold_tensors;                   // by argument
  std::vector<uint8_t> written;                            // by argument
  int writes = 0;
  size_t arguments = 0, returns = 0;       // 0: the op has no schema
  std::atomic<uint64_t> scratch_bytes{0};  // high-water mark of recent calls
  // In a timed period the device is kept busy so long before the op, while the host launches it. 0: not at all.
  std::atomic<uint32_t> delay_nanoseconds{0};
  std::atomic<bool> marked{false};  // its large results are recorded with their source lines

  explicit OpInfo(const c10::OperatorHandle& handle);
  explicit OpInfo(std::string name);  // for a compiled graph's kernel
  std::string name() const;           // with the overload's name
  // Returns true if two runs of this call may differ, because threads write in the order of their arrival.
  bool differs_by_chance(const c10::IValue* args, bool on_accelerator) const {
    if (!adds_in_any_order || !on_accelerator) return races;
    return in_order_unless < 0 || !args[in_order_unless].isBool() || args[in_order_unless].toBool();
  }
  // Returns true if this call changes running statistics.
  bool moves_statistics(const c10::IValue* args) const {
    return always_training || (training >= 0 && args[training].isBool() && args[training].toBool());
  }

 private:
  // Declared and undeclared writes, positions.
  void read_arguments(const c10::FunctionSchema& schema, const facts::NamedOp& row);
  void read_tables(const facts::NamedOp& row);  // facts by the op's name
  void classify(const c10::FunctionSchema& schema, const facts::NamedOp& row);
};

// Returns the op as the maker of its results, with the source line where that is asked for. The caller holds no lock.
// Foreign code may hold one of its own, so its ops have no line.
inline Maker as_maker(const OpInfo* info) {
  const Lines taken = lines_taken.load(std::memory_order_relaxed);
  const bool line = !tl_foreign && (taken == Lines::kOfAll || (taken == Lines::kOfMarkedOps && info->marked.load()));
  return {info, C10_UNLIKELY(line) ? line_of_caller() : 0};
}

// Returns true if the op is foreign and has a C++ kernel that the dispatcher runs before the pager's.
bool runs_above_the_kernel(const c10::OperatorHandle& op);

// Cached for the life of the process.
OpInfo* info_of(const c10::OperatorHandle& op);
// Does the same for a compiled graph's kernel. The key names its source.
OpInfo* info_of_kernel(const std::string& key, const std::string& name);
// No op is marked any more: the budget that looked for leaks has ended. The caller holds the GIL.
void unmark_ops();

}  // namespace memmgr::pager
