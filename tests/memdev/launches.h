// Kernels of compiled graphs, on addresses, and the function that allocates their buffers without an op.
#pragma once

#include <Python.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "native.h"

namespace memdev {

// A function in C with addresses and integers. It runs when its stream gets there.
struct RawKernel : Work {
  static constexpr size_t kMost = 24;
  RawKernel(void* function, std::vector<uint64_t> words, uint64_t bytes)
      : function(function), words(std::move(words)), bytes(bytes) {
    this->words.resize(kMost);
  }
  void Run() override { Call(std::make_index_sequence<kMost>()); }
  std::string Name() const override { return "raw kernel"; }
  int Engine() const override { return kCompute; }
  uint64_t Bytes() const override { return bytes; }
  bool IsOp() const override { return true; }
  bool IsHollow() const override { return hollow.load(); }

 private:
  // A function in C ignores further integers.
  template <size_t... at>
  void Call(std::index_sequence<at...>) {
    reinterpret_cast<void (*)(std::decay_t<decltype(words[at])>...)>(function)(words[at]...);
  }

  void* function;
  std::vector<uint64_t> words;
  uint64_t bytes;
};

// (sizes, strides, dtype), as torch._C._dynamo.guards._empty_strided_cuda.
inline PyObject* EmptyStridedForPython(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *sizes = nullptr, *strides = nullptr, *dtype = nullptr;
  if (!PyArg_ParseTuple(args, "O!O!O", &PyTuple_Type, &sizes, &PyTuple_Type, &strides, &dtype)) return nullptr;
  std::vector<int64_t> numbers[2];
  PyObject* const both[2] = {sizes, strides};
  for (int i = 0; i < 2; ++i) {
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(both[i]); ++k) {
      numbers[i].push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(both[i], k)));
    }
  }
  if (PyErr_Occurred()) return nullptr;
  return THPVariable_Wrap(EmptyStrided(numbers[0], numbers[1], reinterpret_cast<THPDtype*>(dtype)->scalar_type,
                                       std::nullopt, std::nullopt, std::nullopt));
  END_HANDLE_TH_ERRORS
}

}  // namespace memdev
