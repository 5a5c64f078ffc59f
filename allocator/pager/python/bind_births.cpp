#include "python/bind_births.h"

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/lock.h"
#include "base/source_lines.h"
#include "cells/births.h"
#include "cells/cell.h"
#include "cells/types.h"
#include "ops/op_info.h"

namespace memmgr::pager {

struct LivingCell {
  uint64_t serial, storage, bytes;
  bool absent;
  int purpose;
  std::string op;
  uint32_t module, line, birth;
  bool backward;
};

FIELDS(LivingCell,
       "A large cell. `storage`: its storage's address; 0: recipes alone need the cell, or it was alive at the peak. "
       "`purpose`: a "
       "Purpose. `op`: the op that made it; empty: none. `line`: the number of its source line; 0: not recorded. "
       "`birth`: the pass. "
       "`backward`: made in one.",
       serial, storage, bytes, absent, purpose, op, module, line, birth, backward)

struct SurvivingPlace {
  uint32_t line, module;
  uint64_t bytes;
};

FIELDS(SurvivingPlace, "Bytes that a source line in a module has made.", line, module, bytes)

struct Survivors {
  std::string op;
  std::vector<uint32_t> births;
  uint64_t bytes, absent_bytes;
  std::vector<SurvivingPlace> places;
};

FIELDS(Survivors, "Cells of one op that have outlived the pass after that of their birth. `births`: the passes.", op,
       births, bytes, absent_bytes, places)

struct GrownCell {
  std::string op;
  uint64_t bytes;
  bool absent;
  uint32_t line, module, since, last, growths;
};

FIELDS(GrownCell,
       "A cell that its op makes anew from its own earlier result, larger each time. `bytes`: those that it has grown "
       "by. `since`, `last`: the passes of the first one and of this one. `growths`: the passes in which it grew.",
       op, bytes, absent, line, module, since, last, growths)

struct RecordedLine {
  std::string file;
  int line;
  std::string function;
  uint32_t caller;
};

FIELDS(RecordedLine,
       "A source line. `caller`: of a line of a library, the number of the program's own line that led there; 0: none.",
       file, line, function, caller)

namespace {

std::string op_text(const OpInfo* op) { return op ? op->name() : std::string(); }

LivingCell row_of(const Born& born, uint64_t storage, bool absent) {
  const Birth& b = born.birth;
  return {born.serial,   storage,  born.bytes, absent, static_cast<int>(born.purpose),
          op_text(b.op), b.module, b.line,     b.pass, b.backward};
}

// A cell that is made again has the module of its recipe, which may be known later than its birth.
Birth birth_of(const Cell* c) REQUIRES(graph_lock()) {
  Birth b = c->birth;
  const Recipe* r = c->version ? c->version->recipe : nullptr;
  if (b.module == 0 && r) b.module = r->module;
  if (!b.op && r) b.op = r->info;
  return b;
}

std::vector<LivingCell> py_living() {
  std::vector<LivingCell> rows;
  const Hold lock(graph_lock());
  for_each_cell_locked([&](const Cell* c) REQUIRES(graph_lock()) {
    if (c->small) return;
    rows.push_back(row_of({c->serial, c->nbytes, birth_of(c), c->purpose},
                          reinterpret_cast<uintptr_t>(c->storage._unsafe_get_target()),
                          (c->state.load() & kAbsent) != 0));
  });
  return rows;
}

std::vector<LivingCell> py_living_at_peak() {
  std::vector<LivingCell> rows;
  const Hold lock(graph_lock());
  for (const Born& born : living_at_peak_locked()) rows.push_back(row_of(born, 0, false));
  return rows;
}

struct SurvivorSums {
  std::set<uint32_t> passes;  // of births
  uint64_t bytes = 0, absent = 0;
  std::map<std::pair<uint32_t, uint32_t>, uint64_t> places;  // bytes by line and module
};

std::vector<Survivors> py_survivors(size_t mark) {
  std::map<const OpInfo*, SurvivorSums> found;
  {
    const Hold lock(graph_lock());
    const uint32_t now = passes_ended.load();
    for_each_cell_locked([&](const Cell* c) REQUIRES(graph_lock()) {
      if (c->small || c->birth.pass + 2 > now || !c->storage._unsafe_get_target()) return;
      if (c->purpose == Purpose::kParameter || c->purpose == Purpose::kOptimizerState) return;
      const Birth b = birth_of(c);
      SurvivorSums& s = found[b.op];
      s.passes.insert(b.pass);
      s.bytes += c->nbytes;
      if (c->state.load() & kAbsent) s.absent += c->nbytes;
      s.places[{b.line, b.module}] += c->nbytes;
    });
  }
  std::vector<Survivors> list;
  for (const auto& [op, s] : found) {
    if (s.passes.size() < 2) continue;
    if (op && s.passes.size() >= mark) const_cast<OpInfo*>(op)->marked.store(true);
    Survivors one{op_text(op), {s.passes.begin(), s.passes.end()}, s.bytes, s.absent, {}};
    for (const auto& [place, bytes] : s.places) one.places.push_back({place.first, place.second, bytes});
    list.push_back(std::move(one));
  }
  return list;
}

std::vector<GrownCell> py_grown(size_t mark) {
  std::vector<GrownCell> rows;
  const Hold lock(graph_lock());
  for_each_cell_locked([&](const Cell* c) REQUIRES(graph_lock()) {
    const Birth& b = c->birth;
    if (b.times < mark || c->small || c->purpose != Purpose::kOther || !c->storage._unsafe_get_target()) return;
    if (b.growths >= mark) const_cast<OpInfo*>(b.op)->marked.store(true);
    const Birth known = birth_of(c);
    const bool absent = (c->state.load() & kAbsent) != 0;
    rows.push_back({op_text(b.op), b.grown, absent, known.line, known.module, b.since, b.pass, b.growths});
  });
  return rows;
}

std::vector<std::string> names_of(const TextTuple& texts) {
  std::vector<std::string> names;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(texts.object); ++i)
    names.push_back(Cast<std::string>::from(PyTuple_GET_ITEM(texts.object, i)));
  return names;
}

void py_take_lines(Lines lines, bool log, TextTuple folders, TextTuple libraries) {
  skip_folders(names_of(folders), names_of(libraries));
  log_births(log);
  lines_taken.store(lines);
  if (lines != Lines::kOfNone) return;
  forget_births();
  forget_codes();
  unmark_ops();
}

std::vector<RecordedLine> py_source_lines() {
  std::vector<RecordedLine> list;
  for (const SourceLine& l : source_lines()) list.push_back({l.file, l.line, l.function, l.caller});
  return list;
}

uint32_t py_passes_ended() { return passes_ended.load(); }

}  // namespace

void bind_births(Module& m) {
  m.def<&py_living>("living", "", "The large cells, with their origins.");
  m.def<&py_living_at_peak>("living_at_peak", "", "The large cells at the peak of the last logged pass.");
  m.def<&py_survivors>(
      "survivors", "mark",
      "Cells that outlive the pass after that of their birth, by op, where they were born in several passes. States "
      "are left out. An op with `mark` passes of birth is marked: further cells of it have lines.");
  m.def<&py_grown>(
      "grown", "mark",
      "Cells that have grown so often or more. The op of one that did so in as many passes is marked: further cells of "
      "it have lines.");
  m.def<&py_take_lines>(
      "take_lines", "lines, log, folders, libraries",
      "Which ops are recorded with their source lines, whether births are logged, the folders whose functions are no "
      "line, and those whose lines have the program's own line beside them.");
  m.def<&py_source_lines>("source_lines", "", "The recorded lines by number; the first stands for none.");
  m.def<&py_passes_ended>("passes_ended", "", "Backwards of this process.");
}

}  // namespace memmgr::pager
