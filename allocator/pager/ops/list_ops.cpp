#include "ops/list_ops.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "cells/cell.h"
#include "pools/pool.h"

namespace memmgr::pager {

namespace {

constexpr uint64_t kSharesOfBudget = 8;
constexpr uint64_t kUnlimitedSlice = 64 << 20;  // also in a measuring run, whose floor would otherwise be a whole list

uint64_t slice_bytes(const Session& session) {
  if (session.options.slice_bytes) return session.options.slice_bytes;
  if (session.options.torture) return 1;  // every index is a slice
  const uint64_t limit = mm_arena_budget(session.arena);
  return limit >= MM_UNLIMITED ? kUnlimitedSlice : limit / kSharesOfBudget;
}

// On an accelerator torch inspects whole lists to choose one kernel for all tensors or one for each. If all tensors are
// plain and alike, each slice gets the kernel that the whole lists would have got.
bool all_plain(const c10::IValue* args, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    if (!args[i].isTensorList()) continue;
    const at::Tensor* first = nullptr;
    for (const c10::IValue& v : args[i].toListRef()) {
      const at::Tensor& t = v.toTensor();
      if (!t.defined() || !t.is_contiguous()) return false;
      if (!first) first = &t;
      if (t.scalar_type() != first->scalar_type() || t.device() != first->device()) return false;
    }
  }
  return true;
}

}  // namespace

uint64_t bytes_in_list(const Options& options, const at::Tensor& t) {
  if (!t.defined() || !t.has_storage()) return 0;
  const c10::StorageImpl* s = t.storage().unsafeGetStorageImpl();
  const Cell* c = cell_of(s);
  return (c ? c->small : is_small(options, s)) ? 0 : s->nbytes();
}

std::vector<size_t> cuts(const Session& session, const std::vector<uint64_t>& bytes) {
  const uint64_t most = slice_bytes(session);
  std::vector<size_t> at{0};
  uint64_t slice = 0;
  for (size_t k = 0; k < bytes.size(); ++k) {
    if (slice > 0 && slice + bytes[k] > most) {
      at.push_back(k);
      slice = 0;
    }
    slice += bytes[k];
  }
  if (at.size() == 1) return {};
  at.push_back(bytes.size());
  return at;
}

bool share_memory(const std::vector<InList>& all) {
  struct Span {
    const c10::StorageImpl* storage;
    int64_t first, end;  // bytes
    size_t index;
  };
  std::vector<Span> spans;
  spans.reserve(all.size());
  for (const InList& in : all) {
    const c10::TensorImpl& t = *in.tensor;
    if (!t.has_storage() || t.layout() != c10::kStrided || t.numel() == 0) continue;
    int64_t end = t.storage_offset() + 1;
    for (int64_t d = 0; d < t.dim(); ++d) end += (t.size(d) - 1) * t.stride(d);
    const auto bytes = static_cast<int64_t>(t.itemsize());
    spans.push_back({t.unsafe_storage().unsafeGetStorageImpl(), t.storage_offset() * bytes, end * bytes, in.index});
  }
  const auto key = [](const Span& s) { return std::make_tuple(s.storage, s.first); };
  std::sort(spans.begin(), spans.end(), [&](const Span& a, const Span& b) { return key(a) < key(b); });
  for (size_t i = 1; i < spans.size(); ++i) {
    Span& s = spans[i];
    const Span& before = spans[i - 1];
    if (s.storage != before.storage || s.first >= before.end) continue;
    if (s.index != before.index) return true;
    s.end = std::max(s.end, before.end);
  }
  return false;
}

// Returns the bytes at each index, for the call on top of the stack; empty: its lists cannot be cut together.
static std::vector<uint64_t> bytes_by_index(const Options& options, const OpInfo* info,
                                            const torch::jit::Stack& stack) {
  const size_t n = info->op.schema().arguments().size();
  const c10::IValue* args = stack.data() + stack.size() - n;
  const size_t length = args[0].isList() ? args[0].toListRef().size() : 0;
  if (length < 2) return {};
  std::vector<uint64_t> bytes(length, 0);
  for (size_t i = 0; i < n; ++i) {
    if (!args[i].isList()) continue;
    const auto list = args[i].toListRef();
    if (list.empty()) continue;
    if (list.size() != length) return {};
    for (size_t k = 0; k < length; ++k)
      if (list[k].isTensor()) bytes[k] += bytes_in_list(options, list[k].toTensor());
  }
  return bytes;
}

static bool all_alike(const Pool& pool, const OpInfo* info, const torch::jit::Stack& stack) {
  const size_t n = info->op.schema().arguments().size();
  return pool.on_host() || all_plain(stack.data() + stack.size() - n, n);
}

std::vector<size_t> cuts(const Session& session, const OpInfo* info, const torch::jit::Stack& stack) {
  std::vector<size_t> at = cuts(session, bytes_by_index(session.options, info, stack));
  if (!at.empty() && !all_alike(*session.pool, info, stack)) return {};
  return at;
}

Share largest_index(const Session& session, const OpInfo* info, const torch::jit::Stack& stack) {
  const std::vector<uint64_t> bytes = bytes_by_index(session.options, info, stack);
  if (bytes.empty() || !all_alike(*session.pool, info, stack)) return {};
  return {*std::max_element(bytes.begin(), bytes.end()), std::accumulate(bytes.begin(), bytes.end(), uint64_t{0})};
}

torch::jit::Stack slice_of(const c10::IValue* args, size_t n, size_t first, size_t end) {
  torch::jit::Stack slice;
  slice.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    if (!args[i].isList() || args[i].toList().empty()) {
      slice.push_back(args[i]);
      continue;
    }
    const c10::impl::GenericList whole = args[i].toList();
    c10::impl::GenericList part(whole.elementType());
    part.reserve(end - first);
    for (size_t k = first; k < end; ++k) part.push_back(whole.get(k));
    slice.emplace_back(std::move(part));
  }
  return slice;
}

}  // namespace memmgr::pager
