// The recording of a launch: its arguments, its recipe and the check of its signature (rules 5 and 8).
#pragma once

#include <Python.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>

#include "base/constants.h"
#include "dispatch/recording.h"
#include "guards/touched_cells.h"
#include "ops/op_info.h"
#include "recipes/launch_recipe.h"

namespace memmgr::pager {

// A compiled kernel whose launches are ops.
struct LaunchedKernel {
  OpInfo* info;
  std::string args;                // one letter for each argument: a tensor that is read or written, or a number
  PyCFunction original = nullptr;  // of a kernel in C++
};

// The positional arguments of a launch.
using Positional = c10::ArrayRef<PyObject*>;

// A tensor beyond the letters is written.
template <class F>
void for_each_tensor(const LaunchedKernel& kernel, Positional args, const F& visit) {
  for (size_t i = 0; i < args.size(); ++i)
    if (THPVariable_Check(args[i]))
      visit(THPVariable_Unpack(args[i]).unsafeGetTensorImpl(),
            i >= kernel.args.size() || kernel.args[i] != kArgumentRead);
}

// The recipe of a launch. Only launches in the compiled forward of a training have one.
class LaunchRecording {
 public:
  LaunchRecording(const LaunchedKernel& kernel, bool outermost);

  // Reads the arguments, before their tensors are touched. The bytes that the kernel writes over belong to versions.
  // The GIL is held.
  void read(Positional args) {
    if (C10_UNLIKELY(on_)) read_all(args);
  }
  // The cells are pinned, and nothing is written yet. The GIL may be free.
  void begin(const Frame& frame) {
    if (C10_UNLIKELY(on_) && frame.bytes() > 0) record(frame);
  }
  void give_up();
  // Called before the launch. A kernel of this signature leaves bytes of a new buffer unwritten: they are zeros.
  void clear_gaps() {
    if (C10_UNLIKELY(recording_.recipe())) zero_gaps();
  }
  // Called after the launch, with its time on the host. The caller still has the pins. Returns the kernel's time.
  double end(double seconds) { return C10_LIKELY(!recording_.recipe()) ? seconds : check_and_attach(seconds); }

 private:
  void read_all(Positional args);
  // False: the launch cannot be recorded, or its kernel raises an error.
  bool read_arguments(Positional args);
  void record(const Frame& frame);
  void zero_gaps();
  double check_and_attach(double seconds);
  // In the order of the recipe's tensors that are written.
  void note_written(c10::StorageImpl* s);

  const LaunchedKernel& kernel_;
  bool on_;
  c10::SmallVector<KernelArgument, 12> arguments_;
  Recording recording_;
  c10::SmallVector<c10::StorageImpl*, 8> written_;
};

}  // namespace memmgr::pager
