#include "base/source_lines.h"

#include <Python.h>
#include <torch/csrc/autograd/graph_task.h>

#include <map>
#include <unordered_map>
#include <utility>

#include "base/gil.h"
#include "base/no_destructor.h"

namespace memmgr::pager {

std::atomic<Lines> lines_taken{Lines::kOfNone};

namespace {

constexpr size_t kMostCodes = 1 << 16;  // known code objects, each with a reference

// With the GIL.
struct KnownCodes {
  std::vector<std::string> skipped;
  std::unordered_map<PyCodeObject*, bool> skips;
  std::map<std::pair<PyCodeObject*, int>, uint32_t> numbers;
  std::vector<SourceLine> lines{{"", "", 0}};
};
NoDestructor<KnownCodes> known_codes;

void release_codes(KnownCodes& k) {
  for (const auto& code : k.skips) Py_DECREF(code.first);
  k.skips.clear();
  k.numbers.clear();
}

std::string utf8_of(PyObject* o) {
  const char* text = o && PyUnicode_Check(o) ? PyUnicode_AsUTF8(o) : nullptr;
  if (!text) PyErr_Clear();
  return text ? text : "";
}

bool is_skipped(KnownCodes& k, PyCodeObject* code) {
  const auto found = k.skips.find(code);
  if (found != k.skips.end()) return found->second;
  if (k.skips.size() >= kMostCodes) release_codes(k);
  const std::string file = utf8_of(code->co_filename);
  bool skipped = file.empty() || file.rfind("<frozen", 0) == 0 || file == "<string>";
  for (const std::string& folder : k.skipped) skipped |= file.rfind(folder, 0) == 0;
  Py_INCREF(code);
  k.skips.emplace(code, skipped);
  return skipped;
}

uint32_t line_number_of(KnownCodes& k, PyCodeObject* code, int line) {
  const auto [at, is_new] = k.numbers.emplace(std::pair{code, line}, static_cast<uint32_t>(k.lines.size()));
  if (!is_new) return at->second;
#if PY_VERSION_HEX >= 0x030B0000
  PyObject* name = code->co_qualname;
#else
  PyObject* name = code->co_name;
#endif
  SourceLine found{utf8_of(code->co_filename), utf8_of(name), line};
  for (size_t i = 1; i < k.lines.size(); ++i)  // the code object is new, the line need not be
    if (k.lines[i].line == line && k.lines[i].file == found.file && k.lines[i].function == found.function)
      return at->second = static_cast<uint32_t>(i);
  k.lines.push_back(std::move(found));
  return at->second;
}

}  // namespace

uint32_t line_of_caller() {
  if (torch::autograd::get_current_graph_task_id() != -1) return 0;
  if (!Py_IsInitialized() || !PyGILState_GetThisThreadState()) return 0;
  const PyGILState_STATE before = PyGILState_Ensure();
  uint32_t number = 0;
  {
    const NoCollection none;  // a frame's object is a new one: a collection would run finalizers inside of the op
    KnownCodes& k = *known_codes;
    PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
    while (frame) {
      PyCodeObject* code = PyFrame_GetCode(frame);
      if (!is_skipped(k, code)) number = line_number_of(k, code, PyFrame_GetLineNumber(frame));
      Py_DECREF(code);
      PyFrameObject* caller = number ? nullptr : PyFrame_GetBack(frame);
      Py_DECREF(frame);
      frame = caller;
    }
  }
  PyGILState_Release(before);
  return number;
}

const std::vector<SourceLine>& source_lines() { return known_codes->lines; }

void forget_codes() { release_codes(*known_codes); }

void skip_folders(std::vector<std::string> folders) {
  KnownCodes& k = *known_codes;
  if (k.skipped == folders) return;
  release_codes(k);
  k.skipped = std::move(folders);
}

}  // namespace memmgr::pager
