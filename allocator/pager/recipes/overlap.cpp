#include "recipes/overlap.h"

#include <algorithm>

#include "ops/op_info.h"

namespace memmgr::pager {

namespace {

// The distances in one dimension between an element of one view and an element of the other.
struct Apart {
  int64_t stride, least, most;
};

// Returns true if steps within these bounds add up to `distance`, or if that takes too many tries to find out. The
// largest strides come first.
bool reaches(c10::ArrayRef<Apart> dims, int64_t distance) {
  constexpr int64_t kTries = 3;  // for one dimension: strides that lie within each other need two
  if (dims.empty()) return distance == 0;
  const Apart first = dims.front();
  const c10::ArrayRef<Apart> rest = dims.slice(1);
  int64_t least = 0, most = 0;
  for (const Apart& d : rest) {
    least += d.least * d.stride;
    most += d.most * d.stride;
  }
  const auto floor = [](int64_t a, int64_t b) { return a / b - (a % b < 0); };
  const int64_t from = std::max(first.least, -floor(most - distance, first.stride));
  const int64_t to = std::min(first.most, floor(distance - least, first.stride));
  if (to - from >= kTries) return true;
  for (int64_t n = from; n <= to; ++n)
    if (reaches(rest, distance - n * first.stride)) return true;
  return false;
}

bool is_empty(const TensorArg& a) { return std::find(a.sizes.begin(), a.sizes.end(), 0) != a.sizes.end(); }

int64_t end_of(const TensorArg& a) {
  int64_t last = a.offset;
  for (size_t i = 0; i < a.sizes.size(); ++i) last += (a.sizes[i] - 1) * a.strides[i];
  return (last + 1) * static_cast<int64_t>(a.dtype.itemsize());
}

bool same_view(const TensorArg& a, const TensorArg& b) {
  return a.dtype == b.dtype && a.offset == b.offset && a.sizes == b.sizes && a.strides == b.strides;
}

}  // namespace

bool may_overlap(const TensorArg& a, const TensorArg& b) {
  if (is_empty(a) || is_empty(b)) return false;
  const auto begin_of = [](const TensorArg& t) { return t.offset * static_cast<int64_t>(t.dtype.itemsize()); };
  if (end_of(a) <= begin_of(b) || end_of(b) <= begin_of(a)) return false;
  if (a.dtype.itemsize() != b.dtype.itemsize() || a.strides != b.strides) return true;
  c10::SmallVector<Apart, 5> dims;
  for (size_t i = 0; i < a.strides.size(); ++i)
    if (a.strides[i] > 0) dims.push_back({a.strides[i], 1 - b.sizes[i], a.sizes[i] - 1});
  std::sort(dims.begin(), dims.end(), [](const Apart& x, const Apart& y) { return x.stride > y.stride; });
  return reaches(dims, b.offset - a.offset);
}

bool reads_its_own_writes(const Recipe& r, c10::ArrayRef<const c10::StorageImpl*> storages) {
  const auto writes = [](const TensorArg& a) {
    return a.role == ArgumentRole::kWritten || a.role == ArgumentRole::kFresh;
  };
  for (size_t i = 0; i < r.tensors.size(); ++i) {
    if (!writes(r.tensors[i])) continue;
    for (size_t k = 0; k < r.tensors.size(); ++k) {
      const TensorArg& read = r.tensors[k];
      if (writes(read) || read.role == ArgumentRole::kShape || storages[k] != storages[i]) continue;
      if (r.info->pointwise && same_view(r.tensors[i], read)) continue;  // each element is read before it is written
      if (may_overlap(r.tensors[i], read)) return true;
    }
  }
  return false;
}

}  // namespace memmgr::pager
