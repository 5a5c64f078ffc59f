#include "residency/checksums.h"

#include <cerrno>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "base/forked_child.h"
#include "base/lock.h"
#include "base/no_destructor.h"
#include "cells/cell.h"
#include "cells/mapped_range.h"
#include "pools/pool.h"
#include "recipes/op_signature.h"

namespace memmgr::pager {

std::atomic<uint32_t> comparisons{0};

namespace {

// All that is said of bytes that do not match, and done about it.
struct Restored {
  uint64_t nbytes = 0;
  Absence absence = Absence::kEvicted;  // the manner in which the bytes were absent
  const OpInfo* op = nullptr;           // the maker of the cell; null: not known
  std::vector<Kind*> families;          // entries that its recipe and their chain rely on
};

Restored restored(const Cell* c) {
  Restored r{c->nbytes, c->absence, c->birth.op, {}};
  if (r.absence != Absence::kEvicted) return r;
  const Hold lock(graph_lock());
  const Recipe* recipe = c->version ? c->version->recipe : nullptr;
  if (recipe && recipe->checked) r.families = families_of_locked(recipe);
  return r;
}

[[noreturn]] void raise_wrong_bytes(const Restored& r) {
  for (Kind* family : r.families) family->trust = Trust::kNo;
  throw WrongBytes({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                   "memmgr: " + std::to_string(r.nbytes) + " bytes came back other than they left (" +
                       (r.absence == Absence::kEvicted  ? "rematerialized)"
                        : r.absence == Absence::kPacked ? "unpacked)"
                                                        : "read back)") +
                       (r.op ? ", a result of " + r.op->name() : "") +
                       ". The run must not go on with them; please report this." +
                       (r.families.empty() ? "" : " With verify=True every op is tried in each of its sizes first."));
}

struct Comparison {
  Checksum before, after;
  Restored of;
};

struct Comparisons {
  Lock& lock = lock_of(LockId::kComparisons);
  std::deque<Comparison> all GUARDED_BY(lock);
};

NoDestructor<Comparisons> under_way;

// False: the comparison has to be made at once.
bool begin_comparison(Cell* c, const void* data) {
  Pool* const pool = c->pool;
  if (!c->checksum.taken() || pool->session.options.verify || forked_child || !pool->sums_later()) return false;
  // A write on the block's own stream is queued behind the checksum, one on a third stream behind the restore.
  if (pool->stream() != pool->home(data)) return false;
  Comparison begun{{}, pool->begin_sum(data, c->nbytes), restored(c)};
  if (!begun.after.taken()) return false;  // during a capture
  begun.before = std::move(c->checksum);
  Comparisons& to = *under_way;
  const Hold lock(to.lock);
  to.all.push_back(std::move(begun));
  comparisons++;
  return true;
}

bool take_next(bool all, Comparison* next) {
  Comparisons& from = *under_way;
  const Hold lock(from.lock);
  // Only the oldest is asked about, since each question is a call of the driver.
  if (from.all.empty() || !(all || (from.all.front().before.is_there() && from.all.front().after.is_there())))
    return false;
  *next = std::move(from.all.front());
  from.all.pop_front();
  comparisons--;
  return true;
}

// A program that catches the error goes on with wrong bytes: it gets the error again, and the budget's end has it, too.
void keep_wrong(Comparison wrong) {
  Comparisons& to = *under_way;
  const Hold lock(to.lock);
  to.all.push_front(std::move(wrong));
  comparisons++;
}

}  // namespace

bool sum_agrees(Cell* c, const void* data) {
  return sample_agrees(c, data) && (!c->checksum.taken() || c->pool->sum(data, c->nbytes) == c->checksum.value());
}

void check_sum(Cell* c, const void* data) {
  if (sum_agrees(c, data)) return;
  if (has_file_copy(c) && c->absence == Absence::kOffloaded) throw_file_failed(c, ESTALE);
  raise_wrong_bytes(restored(c));
}

bool restored_sum_agrees(Cell* c, const void* data) { return begin_comparison(c, data) || sum_agrees(c, data); }

void check_restored(Cell* c, const void* data) {
  if (!begin_comparison(c, data)) check_sum(c, data);
}

void end_comparisons(bool all) {
  Comparison next;
  while (take_next(all, &next)) {
    if (next.before.value() == next.after.value()) continue;
    const Restored of = next.of;
    keep_wrong(std::move(next));
    raise_wrong_bytes(of);
  }
}

void forget_comparisons() {
  Comparisons& from = *under_way;
  const Hold lock(from.lock);
  from.all.clear();
  comparisons = 0;
}

}  // namespace memmgr::pager
