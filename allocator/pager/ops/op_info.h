// What is known about an op from its name and schema: what it touches, what it writes, whether it can be run again.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace memmgr::pager {

enum class OpClass : uint8_t {
  kOrdinary,   // reads its tensors
  kView,       // only aliases: no bytes are needed for a shape
  kMetadata,   // reads the geometry of its tensors, never their bytes
  kComposite,  // calls other ops, which are seen
  kForeign,    // not torch's: paged around and inside, writes to what it does not declare, too (rule 4)
};

// Of a composite: which of its arguments' addresses it takes, and then runs ops or writes (rule 9).
//   kIndices  the integers among them
//   kAll      all
//   kWeights  on an accelerator its lists of tensors and the integers, on the CPU the integers: before cuDNN's RNNs
//   torch
//             compares where the weights lie with where they would lie in one buffer
enum class RawReads : uint8_t { kNone, kIndices, kAll, kWeights };

struct RawReader {
  const char* name;  // in aten
  RawReads reads;
  bool on_cpu = true;  // there, too
};
const std::vector<RawReader>& raw_readers();

struct OpInfo {
  c10::OperatorHandle op;
  std::string kernel;  // the name of a compiled graph's kernel (launch.h), and `op` says nothing; empty: it is an op
  OpClass kind = OpClass::kOrdinary;
  bool torchs = false;         // aten or prims
  bool recordable = false;     // aten or prims, functional or with one declared write, nothing hidden
  bool seeded = false;         // draws random numbers
  bool uninitialized = false;  // its outputs are memory that nobody has written
  bool overwriter = false;     // writes its first argument without reading it
  bool pointwise = false;      // an element of its result is made of the same one of its tensors
  bool fills = false;          // makes one value everywhere, of no bytes
  bool storage_op = false;     // changes whose storage it is, or how long
  bool reads_hardly = false;   // one element of a tensor at most: as a number, or it only changes its storage
  bool lazy_clone = false;
  bool list_op = false;       // may run in slices (list_ops.h)
  bool nested = false;        // its arguments or results may be nested tensors' sizes
  bool collective = false;    // c10d's: it gives a Work
  bool tells_stream = false;  // to the allocator: that a stream uses the block
  RawReads reads_raw = RawReads::kNone;
  bool expensive = false;          // to run again, as Coop has it: convolutions, products, and what consists of them
  bool native = false;             // not torch's, with a kernel of C++: it may keep addresses to itself
  bool keeps = false;              // the same, and it may read what it was given earlier
  bool only_reads = false;         // torch's own beside aten, with nothing written or sent: packed weights' ops
  bool adds_in_any_order = false;  // on accelerators: any_order()
  bool races = false;              // on the CPU: races_on_cpu()
  int in_order_unless = -1;        // position of the argument that must be true for that
  int generator = -1;              // position of the generator
  int running_mean = -1, running_var = -1, training = -1;  // hidden writes of batch norm
  bool always_training = false;                            // it has no such argument
  std::vector<uint8_t> may_hold_tensors;                   // by argument
  std::vector<uint8_t> written;                            // by argument
  int writes = 0;
  size_t arguments = 0, returns = 0;       // how many; none where the op has no schema
  std::atomic<uint64_t> scratch_bytes{0};  // what it allocated lately, at most

  explicit OpInfo(const c10::OperatorHandle& handle);
  explicit OpInfo(std::string name);  // of a compiled graph's kernel
  std::string name() const;           // with the overload's
  // May two runs of this call differ, because threads write in the order in which they come?
  bool differs_by_chance(const c10::IValue* args, bool on_accelerator) const {
    if (!adds_in_any_order || !on_accelerator) return races;
    return in_order_unless < 0 || !args[in_order_unless].isBool() || args[in_order_unless].toBool();
  }
  // Does this call of it move running statistics?
  bool moves_statistics(const c10::IValue* args) const {
    return always_training || (training >= 0 && args[training].isBool() && args[training].toBool());
  }
};

// Is it foreign, with a C++ kernel that the dispatcher runs before it comes to the pager's key?
bool runs_above_the_kernel(const c10::OperatorHandle& op);

// Cached for the life of the process.
OpInfo* info_of(const c10::OperatorHandle& op);
// The same, of a compiled graph's kernel; the key names its source.
OpInfo* info_of_kernel(const std::string& key, const std::string& name);

}  // namespace memmgr::pager
