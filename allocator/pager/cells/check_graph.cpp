#include "cells/check_graph.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/clock.h"
#include "base/debug.h"
#include "base/lock.h"
#include "cells/cell.h"
#include "cells/types.h"
#include "cells/version.h"
#include "pools/pool.h"

namespace memmgr::pager {

namespace {

// Text of the first equation that does not hold.
class Equations {
 public:
  bool hold() const { return broken_.empty(); }
  const std::string& broken() const { return broken_; }

  template <class... Parts>
  void require(bool holds, const Parts&... parts) {
    if (!holds && broken_.empty()) broken_ = c10::str(parts...);
  }
  void equal(const char* what, uint64_t counted, uint64_t summed) {
    require(counted == summed, what, " is ", counted, ", and the sum is ", summed);
  }

 private:
  std::string broken_;
};

struct Sums {
  uint64_t resident = 0, roots = 0, escaped = 0, newborn = 0, long_pinned = 0, absent = 0, kept = 0;
  bool moving = false;
};

void check_cell_locked(const Cell* c, size_t index, Equations* all, Sums* sums) REQUIRES(graph_lock()) {
  const uint32_t state = c->state.load();
  const bool busy = state & kBusy, absent = state & kAbsent, orphan = !c->storage._unsafe_get_target();
  all->require(c->index == index, "cell ", c->serial, " stands at ", index, " and says ", c->index);
  all->require((state & kPinMask) >= c->standing_pins, "cell ", c->serial, " has ", state & kPinMask,
               " pins, of which ", int(c->standing_pins), " stand");
  if (!orphan && !(state & kDead)) {
    const Cell* of_storage = cell_of(static_cast<const c10::StorageImpl*>(c->storage._unsafe_get_target()));
    // A storage that dies in another thread has no pointer any more; its count is zero before that.
    all->require(of_storage == c || c->storage.use_count() == 0, "the storage of cell ", c->serial,
                 " has another cell");
  }
  all->require(!c->version || c->version->cell == c, "the version of cell ", c->serial, " names another cell");
  if (!busy) {
    all->require(absent == (c->absence != Absence::kNone), "cell ", c->serial, " is ", absent ? "absent" : "resident",
                 " with absence ", int(c->absence));
    all->require(!absent || !c->bytes.get(), "absent cell ", c->serial, " has bytes");
    all->require(absent || c->bytes.get() || (state & kPinMask) || c->nbytes == 0, "resident cell ", c->serial,
                 " has no bytes");
    const bool evicted = c->version && c->version->evicted;
    all->require((c->absence == Absence::kEvicted) == evicted, "cell ", c->serial, " has absence ", int(c->absence),
                 ", and its version is ", evicted ? "evicted" : "not evicted");
    if (c->pool->session.open.load() && !c->given_up) {
      all->require(c->absence != Absence::kOffloaded || c->slot >= 0, "offloaded cell ", c->serial, " has no slot");
      all->require(!evicted || c->version->recipe, "evicted cell ", c->serial, " has no recipe");
      all->require(!absent || orphan || c->name, "absent cell ", c->serial, " has no name");
    }
  }
  sums->moving |= busy && !c->reading;
  if (!c->small && (!absent || c->reading)) sums->resident += c->nbytes;
  sums->resident += c->bits_bytes;
  sums->absent += absent;
  if (c->root) sums->roots += c->nbytes;
  if (c->escape != Escape::kNone) sums->escaped += c->nbytes;
  if (c->newborn) sums->newborn += c->nbytes;
  if (c->counted_as_long_pinned) sums->long_pinned += c->nbytes;
  if (c->kept) sums->kept += c->nbytes;
}

struct Graph {
  std::unordered_set<const Version*> versions;
  std::unordered_set<const Recipe*> recipes;

  void add(const Version* first) REQUIRES(graph_lock()) {
    std::vector<const Version*> open{first};
    while (!open.empty()) {
      const Version* v = open.back();
      open.pop_back();
      if (!v || !versions.insert(v).second) continue;
      const auto add_recipe = [&](const Recipe* r) REQUIRES(graph_lock()) {
        if (!r || !recipes.insert(r).second) return;
        for (const TensorArg& a : r->tensors) open.push_back(a.version);
        for (const Version* o : r->outputs) open.push_back(o);
      };
      add_recipe(v->recipe);
      for (const Recipe* r : v->readers) add_recipe(r);
    }
  }
};

void check_versions_locked(const Graph& graph, Equations* all) REQUIRES(graph_lock()) {
  std::unordered_map<const Version*, uint64_t> needed, read;
  for (const Recipe* r : graph.recipes) {
    uint64_t pulling = 0, outputs = 0;
    for (const Version* o : r->outputs) {
      if (!o) continue;
      ++outputs;
      pulling += pulls_locked(o);
      all->require(o->recipe == r, "an output of a recipe has another recipe");
    }
    all->require(r->refs >= outputs, "a recipe has ", r->refs, " references and ", outputs, " outputs");
    for (const TensorArg& a : r->tensors) {
      if (!a.version) continue;
      needed[a.version] += pulling;
      read[a.version]++;
      all->require(r->broken || a.version->evicted || available_locked(a.version),
                   "a recipe that is not broken reads a version that cannot be had");
    }
  }
  for (const Version* v : graph.versions) {
    const bool owned = v->cell && v->cell->version == v && v->cell->storage._unsafe_get_target();
    all->equal("needed", v->needed, needed[v]);
    all->equal("the number of readers", v->readers.size(), read[v]);
    all->require(v->refs >= read[v] + owned, "a version has ", v->refs, " references, and ", read[v] + owned,
                 " hold it");
    all->require(v->lost || v->evicted || available_locked(v), "a version that cannot be had is not lost");
  }
}

}  // namespace

std::string broken_equation() {
  Equations all;
  Sums sums;
  Graph graph;
  const Hold lock(graph_lock());
  for (size_t i = 0; i < count_cells_locked(); ++i) {
    const Cell* c = cell_at_locked(i);
    check_cell_locked(c, i, &all, &sums);
    graph.add(c->version);
  }
  check_versions_locked(graph, &all);
  uint64_t recipes = sums.kept;
  for (const Recipe* r : graph.recipes) recipes += r->bytes;
  all.require(totals.recipe_bytes.load() >= recipes, "recipe_bytes is ", totals.recipe_bytes.load(),
              ", and recipes take ", recipes);
  all.equal("root_bytes", totals.root_bytes.load(), sums.roots);
  all.equal("escaped_bytes", totals.escaped_bytes.load(), sums.escaped);
  all.equal("newborn_bytes", totals.newborn_bytes.load(), sums.newborn);
  all.equal("long_pinned_bytes", totals.long_pinned_bytes.load(), sums.long_pinned);
  if (!sums.moving) {
    all.equal("resident_cell_bytes", totals.resident_cell_bytes.load(), sums.resident);
    all.equal("absent_cells", static_cast<uint64_t>(totals.absent_cells.load()), sums.absent);
  }
  return all.broken();
}

std::atomic<bool> checks_graph{is_debugging()};
static std::atomic<double> share_of_time{1};
static std::atomic<uint64_t> began{0}, spent{0};  // nanoseconds

void set_graph_checks(double share) {
  checks_graph = share > 0;
  checks_lock_ranks = true;  // for good: locks that a thread has would stay noted
  share_of_time = share;
  began = now_ns();
  spent = 0;
}

void check_graph_after_op() {
  const uint64_t now = now_ns();
  if (share_of_time < 1 && static_cast<double>(spent) > share_of_time * static_cast<double>(now - began)) return;
  const std::string broken = broken_equation();
  spent += now_ns() - now;
  TORCH_CHECK(broken.empty(), "memmgr: the graph is not consistent: ", broken);
}

}  // namespace memmgr::pager
