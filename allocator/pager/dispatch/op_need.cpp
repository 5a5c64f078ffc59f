#include "dispatch/op_need.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/seen_threads.h"
#include "base/tensors.h"
#include "cells/adoption.h"
#include "cells/cell.h"
#include "cells/types.h"
#include "dispatch/the_session.h"
#include "residency/floor.h"

namespace memmgr::pager {

namespace {

c10::IValue without_bytes(const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& t = value.toTensor();
    if (!t.defined()) return value;
    TORCH_CHECK(t.layout() == c10::kStrided && t.has_storage() && !t.is_quantized() && !t.is_nested());
    at::Tensor meta = at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type());
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
    return meta;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> all;
    for (const at::Tensor& t : value.toTensorVector()) all.push_back(without_bytes(t).toTensor());
    return all;
  }
  if (value.isList()) {
    const auto list = value.toList();
    c10::impl::GenericList all(list.elementType());
    for (const c10::IValue& item : value.toListRef()) all.push_back(without_bytes(item));
    return all;
  }
  return value;
}

struct Made {
  uint64_t bytes = 0, largest = 0;
};

// Returns the bytes of the op's results that are no arguments, found by its meta kernel; 0: not known. A kernel in
// Python may ask for memory itself, and its error would be told as the op's.
Made bytes_made(const c10::OperatorHandle& op, const OpInfo* info, const c10::IValue* args, size_t n) {
  using K = c10::DispatchKey;
  struct Restored {
    FailedOp failed = failing_op();
    ~Restored() { failing_op() = std::move(failed); }
  } restored;
  try {
    const at::AutoDispatchBelowADInplaceOrView below;
    const c10::impl::ExcludeDispatchKeyGuard not_seen(
        c10::DispatchKeySet({kKey, K::Python, K::PythonTLSSnapshot, K::PythonDispatcher}));
    torch::jit::Stack stack;
    std::unordered_set<const c10::StorageImpl*> seen;
    const auto add = [&seen](const c10::IValue& value, Made* made) {
      each_tensor(
          value,
          [&](c10::TensorImpl* t) {
            if (!t->has_storage() || !seen.insert(t->unsafe_storage().unsafeGetStorageImpl()).second) return;
            const uint64_t bytes = rounded(t->unsafe_storage().nbytes());
            made->bytes += bytes;
            made->largest = std::max(made->largest, bytes);
          },
          [](c10::StorageImpl*) {});
    };
    Made given, made;
    for (size_t i = 0; i < n; ++i) {
      const bool is_device = op.schema().arguments()[i].name() == "device";  // none: torch's default one
      add(stack.emplace_back(is_device ? c10::IValue(c10::Device(c10::kMeta)) : without_bytes(args[i])), &given);
    }
    op.redispatchBoxed(c10::DispatchKeySet(K::Meta), &stack);
    for (size_t i = stack.size() - std::min(info->returns, stack.size()); i < stack.size(); ++i) add(stack[i], &made);
    return made;
  } catch (...) {  // the bytes are only for the text of another error
    return {};
  }
}

// The tensors that an op was given.
struct Given {
  std::vector<StoragePtr> cells;
  uint64_t all = 0, unmanaged = 0, gaps = 0, largest = 0;  // bytes

  void add(c10::TensorImpl* t) {
    if (!t || !t->has_storage()) return;
    c10::StorageImpl* s = t->unsafe_storage().unsafeGetStorageImpl();
    if (!s || !seen_.insert(s).second) return;
    all += rounded(s->nbytes());
    largest = std::max(largest, rounded(s->nbytes()));
    const Cell* c = cell_of(s);
    if (c && !c->small) gaps += rounded(c->nbytes) - c->nbytes;
    if (c && !c->small) cells.push_back(StoragePtr::reclaim_copy(s));
    if (!c && adoptable(the_session, s) && s->nbytes() >= the_session.options.small_bytes)
      unmanaged += rounded(s->nbytes());
  }

 private:
  std::unordered_set<const c10::StorageImpl*> seen_;
};

void note_need_of(const Given& given, const Made& made) {
  failing_op().read_bytes = given.all;
  failing_op().result_bytes = std::max(failing_op().result_bytes, made.bytes ? made.largest : given.largest);
  // Its results are its only need, and their request is counted already.
  if (given.cells.empty() && !given.unmanaged) return;
  const uint64_t beside =
      bytes_beside_what_stays(the_session, given.cells.size(), [&](size_t i) { return cell_of(given.cells[i].get()); });
  failing_op().need_bytes = bytes_that_stay(the_session) + beside + given.gaps + given.unmanaged + made.bytes;
  note_floor(failing_op().need_bytes);
}

}  // namespace

void note_need(const c10::OperatorHandle& op, const OpInfo* info, const torch::jit::Stack& stack) {
  const size_t n = info->arguments;
  failing_op().name = op.operator_name().name;
  // A list op runs in slices, and an extension's op may need any memory.
  if (!info->torchs || info->list_op || stack.size() < n) return;
  const c10::IValue* args = stack.data() + stack.size() - n;
  Given given;
  for (size_t i = 0; i < n; ++i)
    if (info->may_hold_tensors[i])
      each_tensor(args[i], [&](c10::TensorImpl* t) { given.add(t); }, [](c10::StorageImpl*) {});
  note_need_of(given, info->seeded ? Made{} : bytes_made(op, info, args, n));
}

void note_need(const std::string& kernel, const std::vector<c10::TensorImpl*>& tensors) {
  failing_op().name = kernel;
  Given given;
  for (c10::TensorImpl* t : tensors) given.add(t);
  note_need_of(given, {});  // a kernel is given its outputs
}

}  // namespace memmgr::pager
