#include "recipes/op_signature.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/lock.h"
#include "base/no_destructor.h"

namespace memmgr::pager {

// Signatures that differ in sizes and numbers alone. Where shapes change from step to step, each step's ops would have
// new signatures, and would run twice.
struct Family {
  double seconds = 0, read_bytes = 0;     // sums over the signatures that were checked
  uint32_t tried = 0;                     // signatures that passed their check
  uint64_t least = UINT64_MAX, most = 0;  // bytes of their inputs
  // Stands for the signatures that are not checked. No longer trusted once one failed its check, or leaves bytes of its
  // results unwritten.
  Kind kind;
};

namespace {

constexpr uint32_t kTriedEnough = 32;  // a program with fixed shapes rarely has as many signatures in a family

struct Kinds {
  Lock& lock = lock_of(LockId::kKinds);
  std::unordered_map<uint64_t, Kind*> all GUARDED_BY(lock);  // they live as long as the process: recipes point at them
  std::unordered_map<uint64_t, Family*> families GUARDED_BY(lock);
};

NoDestructor<Kinds> kinds;

void mix_geometry(HashOf<true>* hash, const TensorArg& a) {
  const size_t n = a.sizes.size();
  c10::SmallVector<size_t, 8> axes(n);  // from the innermost
  for (size_t i = 0; i < n; ++i) axes[i] = n - 1 - i;
  std::stable_sort(axes.begin(), axes.end(), [&](size_t x, size_t y) { return a.strides[x] < a.strides[y]; });
  int64_t dense = 1;
  for (const size_t i : axes) {
    hash->mix_number(a.sizes[i], 4);  // small sizes are told apart: of convolutions, channels, broadcast dimensions
    hash->mix(static_cast<uint64_t>(i * 4 + (a.strides[i] == 0 ? 1 : a.strides[i] == dense ? 2 : 3)));
    dense = a.strides[i] * a.sizes[i];
  }
  hash->mix(static_cast<uint64_t>(n + (a.offset ? 100 : 0)));
}

uint64_t family_hash(const Recipe& r, const void* code) {
  HashOf<true> hash;
  hash.mix(reinterpret_cast<uintptr_t>(r.info));
  hash.mix(reinterpret_cast<uintptr_t>(code));
  hash.mix(r.keys.raw_repr());
  hash.mix(static_cast<uint64_t>(r.numerics * 2 + (r.rng.defined() ? 1 : 0)));
  for (const c10::IValue& v : r.args) hash.mix_value(v);
  for (const TensorArg& a : r.tensors) {
    hash.mix(static_cast<uint64_t>(a.argument) * 1024 + static_cast<uint64_t>(a.dtype.toScalarType()) * 8 +
             static_cast<uint64_t>(a.role));
    hash.mix_number(int64_t{a.element});
    hash.mix(static_cast<uint64_t>(a.wrapped_number) + 2 * a.keys.raw_repr());
    mix_geometry(&hash, a);
  }
  return hash.value;
}

uint64_t bytes_of(const Recipe& r) {
  uint64_t bytes = 0;
  for (const TensorArg& a : r.tensors) {
    uint64_t n = a.dtype.itemsize();
    for (const int64_t size : a.sizes) n *= static_cast<uint64_t>(size);
    bytes += n;
  }
  return bytes;
}

bool stands_for_locked(const Options& options, const Family& family, uint64_t bytes) REQUIRES(kinds->lock) {
  const OpInfo* info = family.kind.info;
  // The order depends on values, not on sizes alone.
  if (info->adds_in_any_order && info->in_order_unless < 0) return false;
  return family.kind.trusted() && family.tried >= kTriedEnough && family.least <= bytes && bytes <= family.most &&
         !options.verify;
}

}  // namespace

Kind* kind_of(const Options& options, uint64_t hash, const Recipe& recipe, const c10::KernelFunction& kernel,
              const void* code) {
  struct Entry {
    uint64_t hash = 0;
    Kind* kind = nullptr;
  };
  static thread_local Entry recent[1024];
  Entry& e = recent[hash % 1024];
  // A family's entry that is no longer trusted is looked up again.
  const auto holds = [&](const Kind* k) { return !k->of_family || (k->trusted() && !options.verify); };
  if (e.kind && e.hash == hash && e.kind->info == recipe.info && C10_LIKELY(holds(e.kind))) return e.kind;
  const Hold lock(kinds->lock);
  const auto found = kinds->all.find(hash);
  if (found != kinds->all.end()) {
    e = {hash, found->second};
    return e.kind;
  }
  const auto begin = [&](Kind* kind) {
    kind->info = recipe.info;
    kind->kernel = kernel;
  };
  Family*& family = kinds->families[family_hash(recipe, code)];
  if (!family) {
    family = new Family;
    begin(&family->kind);
    family->kind.trust = Trust::kFamily;
    family->kind.of_family = true;
    family->kind.family = family;
  }
  const uint64_t bytes = bytes_of(recipe);
  if (stands_for_locked(options, *family, bytes)) {
    e = {hash, &family->kind};
    return e.kind;
  }
  Kind* kind = kinds->all[hash] = new Kind;
  begin(kind);
  kind->family = family;
  kind->read_bytes = bytes;
  e = {hash, kind};
  return kind;
}

void end_trial(Session& session, Kind* kind, bool same) {
  const Hold lock(kinds->lock);
  kind->trust.store(same ? Trust::kYes : Trust::kNo);
  if (!same) session.counters.refused_kinds++;
  Family& family = *kind->family;
  if (!same || kind->clears.load()) family.kind.trust = Trust::kNo;
  if (!same) return;
  family.tried++;
  family.seconds += std::max(0.0, kind->seconds.load(std::memory_order_relaxed));
  family.read_bytes += static_cast<double>(kind->read_bytes);
  family.least = std::min(family.least, kind->read_bytes);
  family.most = std::max(family.most, kind->read_bytes);
}

std::vector<Kind*> families_of_locked(const Recipe* recipe) {
  std::vector<Kind*> found;
  std::unordered_set<const Recipe*> seen;
  std::vector<const Recipe*> open{recipe};
  while (!open.empty()) {
    const Recipe* r = open.back();
    open.pop_back();
    if (!r || !r->checked || !seen.insert(r).second) continue;
    if (r->kind->of_family) found.push_back(r->kind);
    for (const TensorArg& a : r->tensors)
      if (a.version) open.push_back(a.version->recipe);
  }
  return found;
}

void note_seconds(Kind* kind, double seconds) {
  const double known = kind->seconds.load(std::memory_order_relaxed);
  if (known < 0 || seconds < known / 2)
    kind->seconds.store(seconds, std::memory_order_relaxed);
  else
    kind->seconds.store(known * (seconds > known ? 1.05 : 1 / 1.05), std::memory_order_relaxed);
}

double seconds_by_family(const Recipe& r) {
  const Hold lock(kinds->lock);
  const Family& family = *r.kind->family;
  return family.read_bytes > 0 ? family.seconds / family.read_bytes * static_cast<double>(bytes_of(r)) : 0;
}

uint64_t untried_bytes() {
  const Hold lock(kinds->lock);
  uint64_t most = 0;
  for (const auto& [hash, kind] : kinds->all)
    if (kind->trust.load() == Trust::kNew) most = std::max(most, kind->needs_bytes.load());
  return most;
}

void forget_untried() {
  const Hold lock(kinds->lock);
  for (const auto& [hash, kind] : kinds->all) kind->needs_bytes = 0;
}

}  // namespace memmgr::pager
