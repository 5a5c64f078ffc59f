#include "cells/births.h"

#include <torch/csrc/autograd/graph_task.h>

#include <unordered_map>
#include <utility>

#include "base/lock.h"
#include "base/module_of_op.h"
#include "base/no_destructor.h"
#include "cells/cell.h"

namespace memmgr::pager {

std::atomic<uint32_t> passes_ended{0};

namespace {

constexpr size_t kMostEvents = 1 << 16;  // of a pass: 4 MB

struct LoggedBirth {
  Born born;
  bool end;
};
struct BirthLog {
  bool on = false;
  bool whole = true;  // the pass that is being logged has had room
  std::vector<LoggedBirth> noted, last;
};
NoDestructor<BirthLog> births OF_GRAPH;

void log_locked(const Cell* c, bool end) REQUIRES(graph_lock()) {
  BirthLog& l = *births;
  if (!l.on || c->small) return;
  if (l.noted.size() >= kMostEvents) {
    l.whole = false;
    return;
  }
  l.noted.push_back({{c->serial, c->nbytes, c->birth, c->purpose}, end});
}

void begin_log_locked(BirthLog& l) REQUIRES(graph_lock()) {
  l.noted.clear();
  l.whole = true;
  if (!l.on) return;
  for_each_cell_locked([](const Cell* c) REQUIRES(graph_lock()) {
    if (c->storage._unsafe_get_target()) log_locked(c, false);
  });
}

void note_end_locked(const Cell* c) REQUIRES(graph_lock()) { log_locked(c, true); }
const ListensToCells listens_to_ends({&note_end_locked, nullptr});

}  // namespace

void begin_life_locked(Cell* c, Maker maker) {
  c->birth = {};
  c->birth.op = maker.op;
  c->birth.pass = passes_ended.load(std::memory_order_relaxed);
  c->birth.line = maker.line;
  if (c->small) return;
  c->birth.module = current_place();
  c->birth.backward = torch::autograd::get_current_graph_task_id() != -1;
  log_locked(c, false);
}

void note_growth_locked(Cell* c, const Cell* read) {
  Birth& b = c->birth;
  const Birth& before = read->birth;
  if (!b.op || b.op != before.op || b.backward || read->nbytes >= c->nbytes) return;
  b.times = before.times + 1;
  b.since = before.times ? before.since : before.pass;
  b.growths = before.growths + (before.pass < b.pass);  // a dense block grows within one pass
  b.grown = before.grown + c->nbytes - read->nbytes;
}

Origin origin_of_locked(const Cell* c) {
  const Recipe* r = c->version ? c->version->recipe : nullptr;
  const OpInfo* op = r ? r->info : c->birth.op;
  if (c->purpose != Purpose::kOther) return {op, kParameters + static_cast<uint32_t>(c->purpose) - 1};
  if (!op) return {op, kData};
  const uint32_t module = r && r->module ? r->module : c->birth.module;
  return {op, c->birth.backward && module <= kOutside ? uint32_t{kBackward} : module};
}

void log_births(bool on) {
  const Hold lock(graph_lock());
  BirthLog& l = *births;
  if (l.on == on) return;
  l.on = on;
  begin_log_locked(l);
}

void forget_births() {
  const Hold lock(graph_lock());
  *births = {};
}

void end_pass_of_births() {
  const Hold lock(graph_lock());
  passes_ended++;
  BirthLog& l = *births;
  if (!l.on) return;
  if (l.whole) l.last = std::move(l.noted);
  begin_log_locked(l);
}

std::vector<Born> living_at_peak_locked() {
  const std::vector<LoggedBirth>& log = births->last;
  uint64_t sum = 0, most = 0;
  size_t highest = 0;
  for (size_t i = 0; i < log.size(); ++i) {
    sum = log[i].end ? sum - log[i].born.bytes : sum + log[i].born.bytes;
    if (sum > most) most = sum, highest = i + 1;
  }
  std::unordered_map<uint64_t, Born> living;
  for (size_t i = 0; i < highest; ++i) {
    if (log[i].end)
      living.erase(log[i].born.serial);
    else
      living.emplace(log[i].born.serial, log[i].born);
  }
  for (size_t i = highest; i < log.size(); ++i) {  // its purpose may have been set after its birth
    const auto found = log[i].end ? living.find(log[i].born.serial) : living.end();
    if (found != living.end()) found->second.purpose = log[i].born.purpose;
  }
  std::vector<Born> all;
  all.reserve(living.size());
  for (const auto& one : living) all.push_back(one.second);
  return all;
}

}  // namespace memmgr::pager
