// What a search over addresses is worth: one recorded run of allocations, replayed through the arena under a budget,
// with each way of finding who leaves. benchmarks/window_worth.py records the runs and makes the table.
//
//   window_replay <trace>      one line of JSON for each way, switch and budget
//
// The trace (written by benchmarks/_window_trace.py) is what a training run asked of the arena, in its order: blocks
// handed out and given back, ops with their inputs, outputs and seconds, which storages autograd saved, and from when
// to when the program itself held them. The replay allocates and frees the same blocks through the C interface of the
// core. A saved storage that the program does not hold may leave; when it is used again it is made again: its op's
// inputs (made again first if they are gone), temporaries and outputs are allocated, and the virtual clock moves on. So
// eviction has its price in memory as well as in time. Prices are DTR's, (own op + evicted ancestors) / staleness, for
// everybody.
//
// Not replayed: offloading, other threads, what torch does not allocate. Memory is mapped but not touched.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "memmgr/core.h"

namespace {

struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Event {
  char kind;  // a alloc, f free, b begin, e end, w write, s save, u unsave, r
              // release, h hold
  int id = 0;
  uint64_t bytes = 0;
  bool dear = false;
  double seconds = 0;
  std::vector<int> storages;
};

struct Trace {
  std::vector<Event> events;
  int storages = 0;
  uint64_t peak_bytes = 0;
};

Trace Load(const char* path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error(std::string("cannot read ") + path);
  Trace trace;
  std::string line;
  std::vector<uint64_t> bytes;
  uint64_t live = 0;
  while (std::getline(file, line)) {
    std::istringstream in(line);
    Event event{};
    in >> event.kind;
    int count = 0;
    if (event.kind == 'a') {
      in >> event.id >> event.bytes;
      bytes.resize(std::max<size_t>(bytes.size(), event.id + 1));
      live += bytes[event.id] = event.bytes;
    } else if (event.kind == 'b' || event.kind == 'e') {
      if (event.kind == 'b') in >> event.dear >> event.seconds;
      in >> count;
      event.storages.resize(count);
      for (int& id : event.storages) in >> id;
    } else {
      in >> event.id;
      if (event.kind == 'f') live -= bytes[event.id];
    }
    if (!in) throw std::runtime_error("odd line: " + line);
    trace.peak_bytes = std::max(trace.peak_bytes, live);
    trace.events.push_back(std::move(event));
  }
  trace.storages = static_cast<int>(bytes.size());
  return trace;
}

// ---- the run
// -----------------------------------------------------------------------------------------------------

struct Setting {
  const char* name;
  int how;
  int remap;
  bool apart;
  bool moves;  // a write gives the storage a new block, as copy on write does
};

struct Outcome {
  bool works = false;
  mm_arena_stats stats{};
  uint64_t evictions = 0, recomputes = 0, for_nothing = 0;
  double recompute_seconds = 0, op_seconds = 0;
};

struct Recipe {
  std::vector<int> inputs, outputs;
  std::vector<uint64_t> temporaries;
  double seconds = 0;
  bool dear = false;
  int stamp = 0;
};

struct Storage {
  void* p = nullptr;
  uint64_t bytes = 0;
  double last_access = 0;
  std::vector<int> recipes;  // the op that made it, and those that wrote to it since
  int saved = 0;
  int pins = 0;
  int stamp = 0;
  bool dear = false;
  bool wanted = false;  // the program would have it in memory
  bool held = false;    // and can reach it
  bool making = false;
};

class Replay {
 public:
  Replay(const Trace& trace, const Setting& setting, uint64_t budget) : trace_(trace), setting_(setting) {
    char text[200] = "";
    arena_ = mm_arena_create(budget, 0, text, sizeof text);
    if (arena_ == nullptr) throw std::runtime_error(text);
    mm_arena_set_layout(arena_, setting.remap, setting.apart);
    mm_arena_set_staleness_exponent(arena_, 1.0);
    mm_arena_set_reclaim(
        arena_,
        [](void* user, uint64_t need, uint64_t request, int) {
          return static_cast<Replay*>(user)->Reclaim(need, request);
        },
        this);
    storages_.resize(trace.storages);
  }
  ~Replay() {
    mm_arena_set_reclaim(arena_, nullptr, nullptr);
    for (Storage& storage : storages_) mm_arena_free(arena_, storage.p);
    for (void* p : scratch_) mm_arena_free(arena_, p);
    if (mm_arena_destroy(arena_) != 0) abort();
  }

  Outcome Run() {
    Outcome outcome;
    try {
      for (const Event& event : trace_.events) Step(event);
      outcome.works = true;
    } catch (const OutOfMemory&) {
    }
    mm_arena_stats_get(arena_, &outcome.stats);
    outcome.evictions = evictions_;
    outcome.recomputes = recomputes_;
    outcome.for_nothing = for_nothing_;
    outcome.recompute_seconds = recompute_seconds_;
    outcome.op_seconds = op_seconds_;
    return outcome;
  }

 private:
  void* Take(uint64_t bytes, bool dear) {
    void* p = mm_arena_alloc_at(arena_, bytes, dear ? MM_SIDE_HIGH : MM_SIDE_LOW);
    if (p == nullptr) throw OutOfMemory("out of memory");
    return p;
  }

  void Drop(Storage* storage) {
    mm_arena_free(arena_, storage->p);
    storage->p = nullptr;
  }

  void Pin(int id, int by) { storages_[id].pins += by; }

  void Step(const Event& event) {
    Storage& own = storages_[event.id];
    switch (event.kind) {
      case 'a':
        own = Storage{};
        own.bytes = event.bytes;
        own.dear = running_ >= 0 && recipes_[running_].dear;
        own.p = Take(event.bytes, own.dear);
        own.wanted = own.held = true;
        own.last_access = clock_;
        if (running_ >= 0) made_.push_back(event.id);
        break;
      case 'f':
        own.wanted = own.held = false;
        if (own.pins == 0) Drop(&own);
        if (running_ >= 0 && std::count(made_.begin(), made_.end(), event.id) > 0)
          recipes_[running_].temporaries.push_back(own.bytes);
        break;
      case 'b':
        running_ = static_cast<int>(recipes_.size());
        recipes_.push_back({event.storages, {}, {}, event.seconds, event.dear, 0});
        made_.clear();
        for (const int id : event.storages) {
          Pin(id, 1);
          Ensure(id);
          storages_[id].last_access = clock_;
        }
        break;
      case 'e':
        for (const int id : recipes_[running_].inputs) Unpin(id);
        clock_ += recipes_[running_].seconds;
        op_seconds_ += recipes_[running_].seconds;
        recipes_[running_].outputs = event.storages;
        for (const int id : event.storages) {
          storages_[id].recipes.push_back(running_);
          storages_[id].last_access = clock_;
        }
        running_ = -1;
        break;
      case 'w':
        if (setting_.moves && own.p != nullptr) {
          own.pins++;
          void* fresh = Take(own.bytes, own.dear);
          own.pins--;
          Drop(&own);
          own.p = fresh;
        }
        break;
      case 's':
        ++own.saved;
        break;
      case 'u':
        --own.saved;
        break;
      case 'r':
        own.held = false;
        break;
      case 'h':
        own.held = true;
        Ensure(event.id);
        own.last_access = clock_;
        break;
      default:
        throw std::runtime_error("unknown event");
    }
  }

  // Keeps what the program has, and frees what was only made on the way.
  void Unpin(int id) {
    Storage& storage = storages_[id];
    if (--storage.pins == 0 && !storage.wanted && storage.p != nullptr) Drop(&storage);
  }

  // ---- made again ----

  void Ensure(int id) {
    if (storages_[id].p != nullptr) return;
    if (storages_[id].recipes.empty() || storages_[id].making) {
      // The program has freed since what this needs. memmgr would have kept it
      // or brought its dependants back; here it gets its bytes for nothing, and
      // the report says how often.
      ++for_nothing_;
      storages_[id].p = Take(storages_[id].bytes, storages_[id].dear);
      return;
    }
    storages_[id].making = true;
    const std::vector<int> recipes = storages_[id].recipes;
    for (const int number : recipes) {
      const Recipe recipe = recipes_[number];
      for (const int input : recipe.inputs) {
        if (input == id) continue;
        Pin(input, 1);
        Ensure(input);
      }
      std::vector<int> made;
      for (const int output : recipe.outputs) {
        Pin(output, 1);
        made.push_back(output);
        if (storages_[output].p == nullptr) storages_[output].p = Take(storages_[output].bytes, storages_[output].dear);
      }
      const size_t below = scratch_.size();
      for (const uint64_t bytes : recipe.temporaries) scratch_.push_back(Take(bytes, recipe.dear));
      for (; scratch_.size() > below; scratch_.pop_back()) mm_arena_free(arena_, scratch_.back());
      clock_ += recipe.seconds;
      recompute_seconds_ += recipe.seconds;
      ++recomputes_;
      for (const int output : made)
        if (output == id)
          --storages_[id].pins;  // kept: whoever asked has it
        else
          Unpin(output);
      for (const int input : recipe.inputs)
        if (input != id) Unpin(input);
    }
    storages_[id].making = false;
    storages_[id].last_access = clock_;
  }

  // ---- who may leave ----

  bool Available(int id) {
    Storage& storage = storages_[id];
    if (storage.p != nullptr) return true;
    if (storage.recipes.empty() || storage.making) return false;
    if (storage.stamp == stamp_) return available_[id];
    storage.stamp = stamp_;
    available_[id] = false;  // what depends on itself cannot be made
    for (const int number : storage.recipes)
      for (const int input : recipes_[number].inputs)
        if (input != id && !Available(input)) return false;
    available_[id] = true;
    return true;
  }

  bool MayLeave(int id) {
    Storage& storage = storages_[id];
    if (storage.p == nullptr || storage.saved <= 0 || storage.held || storage.pins > 0 || storage.making) return false;
    if (storage.recipes.empty()) return false;
    for (const int number : storage.recipes)
      for (const int input : recipes_[number].inputs)
        if (input != id && !Available(input)) return false;
    return true;
  }

  // Each op once, ancestors that are not in memory included.
  double Cost(int id) {
    const int stamp = ++recipe_stamp_;
    double sum = 0;
    work_.assign(storages_[id].recipes.begin(), storages_[id].recipes.end());
    while (!work_.empty()) {
      Recipe& recipe = recipes_[work_.back()];
      work_.pop_back();
      if (recipe.stamp == stamp) continue;
      recipe.stamp = stamp;
      sum += recipe.seconds;
      for (const int input : recipe.inputs)
        if (storages_[input].p == nullptr)
          work_.insert(work_.end(), storages_[input].recipes.begin(), storages_[input].recipes.end());
    }
    return sum;
  }

  uint64_t Reclaim(uint64_t need, uint64_t request) {
    ++stamp_;
    available_.resize(storages_.size());
    for (size_t id = 0; id < storages_.size(); ++id) {
      if (storages_[id].p == nullptr) continue;
      const bool may = MayLeave(static_cast<int>(id));
      const mm_price price{storages_[id].p, &storages_[id], may ? Cost(static_cast<int>(id)) : -1.0,
                           storages_[id].last_access};
      mm_arena_price(arena_, &price, 1);
    }
    victims_.resize(storages_.size());
    int64_t n = mm_arena_choose(arena_, setting_.how, need, request, clock_, victims_.data(), victims_.size());
    // No run can be had: bytes are enough where addresses further up may help.
    if (n < 0 && setting_.remap == MM_REMAP_LAST && need > 0)
      n = mm_arena_choose(arena_, MM_BY_SCORE, need, 0, clock_, victims_.data(), victims_.size());
    uint64_t released = 0;
    for (int64_t i = 0; i < n; ++i) {
      // One that left may have been what another can be made from: the price
      // said "may leave" of each by itself.
      auto* storage = static_cast<Storage*>(victims_[i].owner);
      ++stamp_;
      if (!MayLeave(static_cast<int>(storage - storages_.data()))) continue;
      Drop(storage);
      ++evictions_;
      released += victims_[i].bytes;
    }
    return released;
  }

  const Trace& trace_;
  const Setting setting_;
  mm_arena* arena_ = nullptr;
  std::vector<Storage> storages_;
  std::vector<Recipe> recipes_;
  std::vector<void*> scratch_;
  std::vector<int> made_, work_;
  std::vector<mm_victim> victims_;
  std::vector<char> available_;
  double clock_ = 0, recompute_seconds_ = 0, op_seconds_ = 0;
  uint64_t evictions_ = 0, recomputes_ = 0, for_nothing_ = 0;
  int running_ = -1, stamp_ = 0, recipe_stamp_ = 0;
};

Outcome RunOnce(const Trace& trace, const Setting& setting, uint64_t budget) {
  return Replay(trace, setting, budget).Run();
}

// The smallest budget that works, to a thousandth of the peak. Success is not
// quite monotonous in the budget, as for any greedy eviction: this is the
// smallest found by bisection.
uint64_t Floor(const Trace& trace, const Setting& setting) {
  uint64_t fails = 0, works = trace.peak_bytes * 2;
  while (works - fails > std::max<uint64_t>(trace.peak_bytes / 1000, 4096)) {
    const uint64_t middle = (fails + works) / 2;
    if (RunOnce(trace, setting, middle).works)
      works = middle;
    else
      fails = middle;
  }
  return works;
}

void Print(const Trace& trace, const Setting& setting, const char* where, uint64_t budget, uint64_t floor) {
  const Outcome o = RunOnce(trace, setting, budget);
  const mm_arena_stats& s = o.stats;
  const auto number = [](uint64_t value) { return static_cast<double>(value); };
  const double episodes = number(std::max<uint64_t>(1, s.episodes));
  const double searches = number(std::max<uint64_t>(1, s.searches));
  const std::pair<const char*, double> fields[] = {
      {"apart", setting.apart},
      {"moves", setting.moves},
      {"works", o.works},
      {"budget", number(budget)},
      {"peak", number(trace.peak_bytes)},
      {"floor", number(floor)},
      {"episodes", number(s.episodes)},
      {"contiguity", number(s.episodes_contiguity)},
      {"evictions", number(o.evictions)},
      {"evicted", number(s.evicted_bytes)},
      {"beyond", number(s.evicted_beyond_bytes)},
      {"excess", number(s.evicted_excess_bytes)},
      {"remapped", number(s.remapped_bytes)},
      {"recomputes", number(o.recomputes)},
      {"for_nothing", number(o.for_nothing)},
      {"rate", s.free_share_sum / episodes},
      {"rate_max", s.free_share_max},
      {"fragmentation", s.fragmentation_sum / episodes},
      {"fragmentation_max", s.fragmentation_max},
      {"search_us", 1e-3 * number(s.search_nanoseconds) / searches},
      {"search_max_us", 1e-3 * number(s.search_max_nanoseconds)},
      {"recompute_seconds", o.recompute_seconds},
      {"op_seconds", o.op_seconds},
  };
  printf("{\"way\": \"%s\", \"where\": \"%s\"", setting.name, where);
  for (const auto& [name, value] : fields) printf(", \"%s\": %.12g", name, value);
  printf("}\n");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    fprintf(stderr, "window_replay <trace>\n");
    return 2;
  }
  const Trace trace = Load(argv[1]);
  std::vector<Setting> settings;
  for (const bool apart : {false, true})
    for (const bool moves : {false, true}) {
      settings.push_back({"window", MM_BY_WINDOW, MM_REMAP_NEVER, apart, moves});
      settings.push_back({"score", MM_BY_SCORE, MM_REMAP_NEVER, apart, moves});
      settings.push_back({"dte", MM_BY_DTE, MM_REMAP_NEVER, apart, moves});
      settings.push_back({"remap", MM_BY_SCORE, MM_REMAP_FIRST, apart, moves});
      settings.push_back({"window, then remap", MM_BY_WINDOW, MM_REMAP_LAST, apart, moves});
    }
  std::vector<uint64_t> floors;
  uint64_t highest = 0;
  for (const Setting& setting : settings) {
    floors.push_back(Floor(trace, setting));
    // Where everybody can work whose writes stay in place.
    if (!setting.moves) highest = std::max(highest, floors.back());
  }
  for (size_t i = 0; i < settings.size(); ++i) {
    Print(trace, settings[i], "50 %", trace.peak_bytes / 2, floors[i]);
    Print(trace, settings[i], "near the floor", highest + highest / 20, floors[i]);
  }
  return 0;
}
