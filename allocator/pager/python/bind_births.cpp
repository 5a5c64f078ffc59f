#include "python/bind_births.h"

#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "base/lock.h"
#include "base/source_lines.h"
#include "cells/births.h"
#include "cells/cell.h"
#include "cells/types.h"
#include "ops/op_info.h"

namespace memmgr::pager {

namespace {

using Unsigned = unsigned long long;

// A tuple as Py_BuildValue makes it is added to the list; on an error the list ends.
void append_new(PyObject** list, PyObject* item) {
  if (*list && (!item || PyList_Append(*list, item) < 0)) Py_CLEAR(*list);
  Py_XDECREF(item);
}

std::string op_text(const OpInfo* op) { return op ? op->name() : std::string(); }

struct LivingCell {
  Born born;
  Unsigned storage = 0;
  bool absent = false;
};

// (serial, storage's address, bytes, absent, purpose, op or "", module, line, pass, in backward)
PyObject* list_of_living(const std::vector<LivingCell>& rows) {
  PyObject* list = PyList_New(0);
  for (const LivingCell& r : rows) {
    const Birth& b = r.born.birth;
    append_new(&list, Py_BuildValue("(KKKNisIIIN)", static_cast<Unsigned>(r.born.serial), r.storage,
                                    static_cast<Unsigned>(r.born.bytes), PyBool_FromLong(r.absent),
                                    static_cast<int>(r.born.purpose), op_text(b.op).c_str(), b.module, b.line, b.pass,
                                    PyBool_FromLong(b.backward)));
  }
  return list;
}

// A cell that is made again has the module of its recipe, which may be known later than its birth.
Birth birth_of(const Cell* c) {
  Birth b = c->birth;
  const Recipe* r = c->version ? c->version->recipe : nullptr;
  if (b.module == 0 && r) b.module = r->module;
  if (!b.op && r) b.op = r->info;
  return b;
}

// living() -> rows of the large cells; a storage's address is 0 where recipes alone need the cell
PyObject* py_living(PyObject*, PyObject*) {
  std::vector<LivingCell> rows;
  {
    const Hold lock(graph_lock());
    for_each_cell_locked([&](const Cell* c) {
      if (c->small) return;
      const auto storage = static_cast<Unsigned>(reinterpret_cast<uintptr_t>(c->storage._unsafe_get_target()));
      rows.push_back({{c->serial, c->nbytes, birth_of(c), c->purpose}, storage, (c->state.load() & kAbsent) != 0});
    });
  }
  return list_of_living(rows);
}

// living_at_peak() -> rows of the last logged pass; storages and residency are not known
PyObject* py_living_at_peak(PyObject*, PyObject*) {
  std::vector<LivingCell> rows;
  {
    const Hold lock(graph_lock());
    for (const Born& born : living_at_peak_locked()) rows.push_back({born, 0, false});
  }
  return list_of_living(rows);
}

// One op's cells that have outlived the pass after that of their birth.
struct Survivors {
  std::set<uint32_t> passes;  // of their births
  Unsigned bytes = 0, absent = 0;
  std::map<std::pair<uint32_t, uint32_t>, Unsigned> places;  // bytes by line and module
};

// survivors(mark) -> [(op, passes of birth, bytes, absent bytes, [(line, module, bytes)])] of the ops whose cells, born
// in several passes, have all outlived the pass after; states are left out. An op with so many passes of birth is
// marked: further cells of it are recorded with their lines.
PyObject* py_survivors(PyObject*, PyObject* mark) {
  const size_t least = PyLong_AsSize_t(mark);
  if (PyErr_Occurred()) return nullptr;
  std::map<const OpInfo*, Survivors> found;
  {
    const Hold lock(graph_lock());
    const uint32_t now = passes_ended.load();
    for_each_cell_locked([&](const Cell* c) {
      if (c->small || c->birth.pass + 2 > now || !c->storage._unsafe_get_target()) return;
      if (c->purpose == Purpose::kParameter || c->purpose == Purpose::kOptimizerState) return;
      const Birth b = birth_of(c);
      Survivors& s = found[b.op];
      s.passes.insert(b.pass);
      s.bytes += c->nbytes;
      if (c->state.load() & kAbsent) s.absent += c->nbytes;
      s.places[{b.line, b.module}] += c->nbytes;
    });
  }
  PyObject* list = PyList_New(0);
  for (const auto& [op, s] : found) {
    if (s.passes.size() < 2) continue;
    if (op && s.passes.size() >= least) const_cast<OpInfo*>(op)->marked.store(true);
    PyObject* places = PyList_New(0);
    for (const auto& [place, bytes] : s.places)
      append_new(&places, Py_BuildValue("(IIK)", place.first, place.second, bytes));
    PyObject* passes = PyList_New(0);
    for (const uint32_t pass : s.passes) append_new(&passes, PyLong_FromUnsignedLong(pass));
    append_new(&list, Py_BuildValue("(sNKKN)", op_text(op).c_str(), passes, s.bytes, s.absent, places));
  }
  return list;
}

// take_lines(mode, log, folders): 0 of no op, 1 of marked ops, 2 of all; whether births are logged; the folders whose
// functions are no line of the program
PyObject* py_take_lines(PyObject*, PyObject* args) {
  int mode, log;
  PyObject* folders;
  if (!PyArg_ParseTuple(args, "ipO!", &mode, &log, &PyTuple_Type, &folders)) return nullptr;
  std::vector<std::string> names;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(folders); ++i) {
    const char* name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(folders, i));
    if (!name) return nullptr;
    names.emplace_back(name);
  }
  skip_folders(std::move(names));
  log_births(log);
  lines_taken.store(static_cast<Lines>(mode));
  Py_RETURN_NONE;
}

// source_lines() -> [(file, line, function)] by number
PyObject* py_source_lines(PyObject*, PyObject*) {
  PyObject* list = PyList_New(0);
  for (const SourceLine& l : source_lines())
    append_new(&list, Py_BuildValue("(sis)", l.file.c_str(), l.line, l.function.c_str()));
  return list;
}

PyObject* py_passes_ended(PyObject*, PyObject*) { return PyLong_FromUnsignedLong(passes_ended.load()); }

}  // namespace

PyMethodDef birth_methods[] = {
    {"living", py_living, METH_NOARGS, "the large cells, with their origins"},
    {"living_at_peak", py_living_at_peak, METH_NOARGS, "the large cells at the peak of the last logged pass"},
    {"survivors", py_survivors, METH_O, "survivors(mark): cells that outlive their pass, by op"},
    {"take_lines", py_take_lines, METH_VARARGS, "take_lines(mode, log, folders)"},
    {"source_lines", py_source_lines, METH_NOARGS, "(file, line, function) by number"},
    {"passes_ended", py_passes_ended, METH_NOARGS, "backwards of this process"},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace memmgr::pager
