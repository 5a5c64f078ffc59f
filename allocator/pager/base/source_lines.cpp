#include "base/source_lines.h"

#include <Python.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "base/gil.h"
#include "base/no_destructor.h"

namespace memmgr::pager {

std::atomic<Lines> lines_taken{Lines::kOfNone};

namespace {

constexpr size_t kMostCodes = 1 << 16;  // known code objects, each with a reference

enum class Whose : uint8_t { kProgram, kLibrary, kSkipped };

// With the GIL.
struct KnownCodes {
  std::vector<std::string> skipped, libraries;
  std::unordered_map<PyCodeObject*, Whose> owners;
  std::map<std::tuple<PyCodeObject*, int, uint32_t>, uint32_t> numbers;
  std::vector<SourceLine> lines{{"", "", 0, 0}};
};
NoDestructor<KnownCodes> known_codes;

void release_codes(KnownCodes& k) {
  for (const auto& code : k.owners) Py_DECREF(code.first);
  k.owners.clear();
  k.numbers.clear();
}

std::string utf8_of(PyObject* o) {
  const char* text = o && PyUnicode_Check(o) ? PyUnicode_AsUTF8(o) : nullptr;
  if (!text) PyErr_Clear();
  return text ? text : "";
}

bool is_in(const std::string& file, const std::vector<std::string>& folders) {
  return std::any_of(folders.begin(), folders.end(), [&](const auto& folder) { return file.rfind(folder, 0) == 0; });
}

Whose owner_of(KnownCodes& k, PyCodeObject* code) {
  const auto found = k.owners.find(code);
  if (found != k.owners.end()) return found->second;
  if (k.owners.size() >= kMostCodes) release_codes(k);
  const std::string file = utf8_of(code->co_filename);
  const bool none = file.empty() || file.rfind("<frozen", 0) == 0 || file == "<string>";
  const Whose owner = none || is_in(file, k.skipped) ? Whose::kSkipped
                      : is_in(file, k.libraries)     ? Whose::kLibrary
                                                     : Whose::kProgram;
  Py_INCREF(code);
  k.owners.emplace(code, owner);
  return owner;
}

uint32_t line_number_of(KnownCodes& k, PyCodeObject* code, int line, uint32_t caller) {
  const auto [at, is_new] = k.numbers.emplace(std::tuple{code, line, caller}, static_cast<uint32_t>(k.lines.size()));
  if (!is_new) return at->second;
#if PY_VERSION_HEX >= 0x030B0000
  PyObject* name = code->co_qualname;
#else
  PyObject* name = code->co_name;
#endif
  SourceLine found{utf8_of(code->co_filename), utf8_of(name), line, caller};
  for (size_t i = 1; i < k.lines.size(); ++i)  // the code object is new, the line need not be
    if (k.lines[i].line == line && k.lines[i].caller == caller && k.lines[i].file == found.file &&
        k.lines[i].function == found.function)
      return at->second = static_cast<uint32_t>(i);
  k.lines.push_back(std::move(found));
  return at->second;
}

// Returns the number of the first line from the frame upwards that is the program's, or a library's where `least` says
// so. Takes the reference.
uint32_t line_from(KnownCodes& k, PyFrameObject* frame, Whose least) {
  uint32_t number = 0;
  while (frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const Whose owner = owner_of(k, code);
    if (owner <= least) {
      const uint32_t caller = owner == Whose::kLibrary ? line_from(k, PyFrame_GetBack(frame), Whose::kProgram) : 0;
      owner_of(k, code);  // the walk may have released it
      number = line_number_of(k, code, PyFrame_GetLineNumber(frame), caller);
    }
    Py_DECREF(code);
    PyFrameObject* above = number ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = above;
  }
  return number;
}

}  // namespace

uint32_t line_of_caller() {
  if (torch::autograd::get_current_graph_task_id() != -1) return 0;
  if (!Py_IsInitialized() || !PyGILState_GetThisThreadState()) return 0;
  const PyGILState_STATE before = PyGILState_Ensure();
  uint32_t number = 0;
  {
    const NoCollection none;  // a frame's object is a new one: a collection would run finalizers inside of the op
    number = line_from(*known_codes, PyThreadState_GetFrame(PyThreadState_Get()), Whose::kLibrary);
  }
  PyGILState_Release(before);
  return number;
}

const std::vector<SourceLine>& source_lines() { return known_codes->lines; }

void forget_codes() { release_codes(*known_codes); }

void skip_folders(std::vector<std::string> folders, std::vector<std::string> libraries) {
  KnownCodes& k = *known_codes;
  if (k.skipped == folders && k.libraries == libraries) return;
  release_codes(k);
  k.skipped = std::move(folders);
  k.libraries = std::move(libraries);
}

}  // namespace memmgr::pager
