// memdev: a torch device (PrivateUse1) on a double of the CUDA driver. Kernels are torch's CPU kernels, and they run
// when their stream gets to them, on raw pointers: results that a program forgets to wait for are really not there yet,
// and memory that it frees too early is really overwritten.
//
// A kernel that runs late, in any thread, sees the process-wide switches of that moment (oneDNN, matmul precision,
// deterministic algorithms), where a GPU's would see those of its launch. A program that changes them between launches
// has to synchronise first.
#include <pthread.h>
#include <torch/library.h>

#include "autocast.h"
#include "guard.h"
#include "kernels.h"
#include "launches.h"
#include "memory.h"
#include "native.h"

namespace memdev {

const char* const kNative[] = {"aten::empty.memory_format",
                               "aten::empty_strided",
                               "aten::view",
                               "aten::as_strided",
                               "aten::_reshape_alias",
                               "aten::resize_",
                               "aten::set_",
                               "aten::set_.source_Storage",
                               "aten::set_.source_Storage_storage_offset",
                               "aten::set_.source_Tensor",
                               "aten::is_set_to",
                               "aten::record_stream",
                               "aten::_copy_from",
                               "aten::_copy_from_and_resize",
                               "aten::native_dropout"};

// Ops that also run as one kernel. Torch would compose them of smaller ops in another order than its CPU kernel, or
// they have no CPU kernel by name and call this device's.
const char* const kWhole[] = {"aten::convolution", "aten::_convolution", "aten::convolution_backward",
                              "aten::conj_physical_"};

// Ops of GPUs that the CPU does not have: called by name, in hollow mode.
const char* const kHollow[] = {"aten::_scaled_dot_product_fused_attention_overrideable",
                               "aten::_scaled_dot_product_fused_attention_overrideable_backward"};

void Register() {
  static Guard guard;
  static Hooks hooks;
  c10::impl::registerDeviceGuard(c10::kPrivateUse1, &guard);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(c10::kPrivateUse1, &memory, 0);

  auto* aten = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  aten->impl("empty.memory_format", TORCH_FN(Empty));
  aten->impl("empty_strided", TORCH_FN(EmptyStrided));
  aten->impl("view", TORCH_FN(at::native::view));
  aten->impl("as_strided", TORCH_FN(AsStrided));
  aten->impl("_reshape_alias", TORCH_FN(ReshapeAlias));
  aten->impl("resize_", TORCH_FN(Resize));
  aten->impl("set_", TORCH_FN(SetEmpty));
  aten->impl("set_.source_Storage", TORCH_FN(static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_)));
  aten->impl("set_.source_Storage_storage_offset", TORCH_FN(SetStorage));
  aten->impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  aten->impl("is_set_to", TORCH_FN(at::native::is_set_to));
  aten->impl("record_stream", TORCH_FN(RecordStreamOp));
  aten->impl("_copy_from", TORCH_FN(CopyFrom));
  aten->impl("_copy_from_and_resize", TORCH_FN(CopyFromAndResize));
  aten->impl("native_dropout", TORCH_FN(NativeDropout));

  // An op that has a CPU kernel is one kernel here, too: the same bits, and as many launches as ops.
  std::set<std::string> done(std::begin(kNative), std::end(kNative));
  auto late = [&](const std::string& name) {
    if (done.insert(name).second) aten->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&Fallback>());
  };
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findSchema(name);
    if (op && op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) late(c10::toString(name));
  }
  for (const char* name : kWhole) late(name);
  for (const char* name : kHollow) late(name);

  RegisterAutocast();

  // Lazily conjugated or negated tensors are resolved by a copy, which must then take them as they are.
  for (auto key : {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative}) {
    auto* lazy = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    lazy->impl("_copy_from", torch::CppFunction::makeFallthrough());
  }

  auto* others = new torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  others->fallback(torch::CppFunction::makeFromBoxedFunction<&Fallback>());
}

}  // namespace memdev

#define MEMDEV_API extern "C" __attribute__((visibility("default")))

// Loads the driver library and registers the device. Returns an empty text, or the error.
MEMDEV_API const char* memdev_start(const char* driver_path) {
  static std::string problem;
  try {
    problem = memdev::driver.Load(driver_path);
    if (problem.empty()) memdev::Register();
    // A forked child has the tensors, but not the device.
    pthread_atfork(nullptr, nullptr, [] { memdev::closing.store(true); });
  } catch (const std::exception& error) {
    problem = error.what();
  }
  return problem.c_str();
}

MEMDEV_API int memdev_device_count() { return memdev::driver.devices; }

// From now on nothing is queued and nothing is given back: for the interpreter's end.
MEMDEV_API void memdev_close() {
  for (int i = 0; i < memdev::driver.devices; ++i) {
    memdev::driver.cuSetCurrent(memdev::driver.contexts[i]);
    memdev::driver.cuCtxSynchronize();
  }
  memdev::closing.store(true);
}

// Launches a function in C on the current stream: `n` addresses and integers, and the bytes that it reads and writes.
MEMDEV_API void memdev_launch(void* function, int n, const uint64_t* words, uint64_t bytes) {
  const int device = memdev::thread_state.device;
  memdev::Launch(device, memdev::CurrentStream(device),
                 std::make_unique<memdev::RawKernel>(function, std::vector<uint64_t>(words, words + n), bytes));
}
// A function for Python. The GIL is held.
MEMDEV_API PyObject* memdev_empty_strided() {
  static PyMethodDef def = {"empty_strided_memdev", &memdev::EmptyStridedForPython, METH_VARARGS, nullptr};
  return PyCFunction_New(&def, nullptr);
}
MEMDEV_API void memdev_capture(int more) { memdev::captures.fetch_add(more); }
// The double has virtual time. `hollow`: kernels and large copies do nothing.
MEMDEV_API void memdev_set_timed(int on, int is_hollow) {
  memdev::timed.store(on != 0);
  memdev::hollow.store(is_hollow != 0);
}
MEMDEV_API void memdev_set_poison(int on) { memdev::poison.store(on != 0); }
MEMDEV_API void memdev_use_own_allocator() { c10::SetAllocator(c10::kPrivateUse1, &memdev::memory, 255); }
MEMDEV_API uint64_t memdev_launches() { return memdev::launches.load(); }
MEMDEV_API void memdev_empty_cache() { memdev::memory.EmptyCache(); }

// "name count" lines of the ops that could not be launched late.
MEMDEV_API const char* memdev_prompt_ops() {
  static thread_local std::string text;
  text.clear();
  std::lock_guard<std::mutex> lock(memdev::prompt.mutex);
  for (const auto& [name, count] : memdev::prompt.counts) text += name + " " + std::to_string(count) + "\n";
  return text.c_str();
}
