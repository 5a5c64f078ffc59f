#include "remat/determinism_check.h"

#include <algorithm>
#include <cstring>

#include "cells/cell.h"
#include "cells/pointer_trap.h"
#include "ops/op_info.h"
#include "pools/pool.h"
#include "remat/rematerialize.h"

namespace memmgr::pager {

namespace {

constexpr int kPattern = 0xFF;  // not a number: an op that reads such bytes shows it

Compared compare(Pool& pool, c10::ArrayRef<c10::StorageImpl*> outputs, const std::vector<StoragePtr>& made, int fill) {
  Compared found;
  for (size_t i = 0; i < outputs.size() && !found.other; ++i) {
    if (!outputs[i]) continue;
    const uint64_t nbytes = outputs[i]->nbytes();
    if (i >= made.size() || !made[i] || made[i]->nbytes() != nbytes) {
      found.equal = false;
      found.other = true;
      break;
    }
    pool.compare(pointer_of(outputs[i]).get(), pointer_of(made[i].get()).get(), nbytes, fill, &found);
  }
  return found;
}

}  // namespace

Again run_again(Session& session, const Recipe& r, c10::ArrayRef<c10::StorageImpl*> outputs,
                std::vector<StoragePtr> before) {
  session.counters.trials++;
  Pool& pool = *session.pool;
  // An op that writes to its arguments can run only once more, and that run is the one that is timed on a device.
  const int fill = pool.fills() && (pool.on_host() || !r.info->writes) ? kPattern : -1;
  if (fill >= 0 && !pool.on_host()) run_over_inputs(pool, r, before, -1);  // only timed
  std::vector<StoragePtr> made = run_over_inputs(pool, r, before, fill);
  const Compared first = compare(pool, outputs, made, fill);
  if (r.info->writes) return first.equal ? Again::kSame : Again::kOther;
  if (first.other) return Again::kOther;
  if (!first.gaps) return Again::kSame;
  // Gaps hold the bytes that malloc had there. These may be the pattern, from the memory of an earlier check. The op's
  // own results may be the pattern, too. So a run over zeros decides.
  made.clear();
  made = run_over_inputs(pool, r, before, 0);
  const Compared second = compare(pool, outputs, made, 0);
  if (second.other) return Again::kOther;
  if (first.equal && second.equal) return Again::kSame;
  // From now on gaps are zeros, also in the first result.
  for (size_t i = 0; i < outputs.size(); ++i)
    if (outputs[i]) pool.copy(pointer_of(outputs[i]).get(), pointer_of(made[i].get()).get(), outputs[i]->nbytes());
  return Again::kSameWhereWritten;
}

namespace {

uint64_t sum_of(Pool& pool, c10::ArrayRef<c10::StorageImpl*> outputs) {
  uint64_t sum = 0;
  for (const c10::StorageImpl* s : outputs)
    if (s) sum = (sum ^ pool.sum(pointer_of(s).get(), s->nbytes())) * 0x9E3779B185EBCA87ull;
  return sum;
}

// Sets words of 4 bytes that hold the pattern to zero. False: there are none.
bool clear_gaps(c10::ArrayRef<c10::StorageImpl*> outputs) {
  using Word = uint32_t;
  Word pattern;
  std::memset(&pattern, kPattern, sizeof pattern);
  bool any = false;
  for (const c10::StorageImpl* s : outputs) {
    if (!s) continue;
    char* data = static_cast<char*>(pointer_of(s).get());
    for (uint64_t at = 0; at < s->nbytes(); at += sizeof pattern) {
      Word word = pattern;
      const uint64_t n = std::min<uint64_t>(sizeof word, s->nbytes() - at);
      std::memcpy(&word, data + at, n);
      if (word != pattern) continue;
      std::memset(data + at, 0, n);
      any = true;
    }
  }
  return any;
}

// Runs the recipe once more. Its results replace those in `all`.
void replace(Pool& pool, const Recipe& r, c10::ArrayRef<c10::StorageImpl*> outputs,
             c10::ArrayRef<c10::StorageImpl*> all, int fill) {
  for (c10::StorageImpl* s : outputs)
    if (s) cell_of(s)->bytes.clear();
  std::vector<StoragePtr> none;
  const std::vector<StoragePtr> made = run_over_inputs(pool, r, none, fill);
  for (size_t i = 0; i < all.size(); ++i) {
    c10::StorageImpl* to = all[i];
    c10::StorageImpl* from = i < made.size() ? made[i].get() : nullptr;
    const bool large = i < outputs.size() && outputs[i];
    // An input's storage, or a large result's under another shape.
    if (!large && (!to || !from || cell_of(to))) continue;
    TORCH_CHECK(from && from->nbytes() == to->nbytes(), "memmgr: a second run has results of other sizes");
    if (!large) {
      if (to->nbytes() > 0) std::memcpy(pointer_of(to).get(), pointer_of(from).get(), to->nbytes());
      continue;
    }
    Cell* c = cell_of(to);
    c->bytes = std::move(pointer_of(from));
    show_bytes(to, c->bytes.get(), c);
  }
}

}  // namespace

Again run_again_in_place(Session& session, const Recipe& r, c10::ArrayRef<c10::StorageImpl*> outputs,
                         c10::ArrayRef<c10::StorageImpl*> all) {
  session.counters.trials++;
  const uint64_t first = sum_of(*session.pool, outputs);
  replace(*session.pool, r, outputs, all, kPattern);
  const uint64_t second = sum_of(*session.pool, outputs);
  if (!clear_gaps(outputs)) return first == second ? Again::kSame : Again::kOther;
  const uint64_t cleared = sum_of(*session.pool, outputs);
  replace(*session.pool, r, outputs, all, 0);
  const uint64_t third = sum_of(*session.pool, outputs);
  if (first == second && second == third) return Again::kSame;  // such words are the op's own results
  return third == cleared ? Again::kSameWhereWritten : Again::kOther;
}

}  // namespace memmgr::pager
