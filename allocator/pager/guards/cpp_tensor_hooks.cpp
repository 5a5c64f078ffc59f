#include "guards/cpp_tensor_hooks.h"

#include <ATen/core/VariableHooksInterface.h>
#include <torch/csrc/autograd/cpp_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <type_traits>
#include <utility>

#include "base/seen_threads.h"
#include "base/session.h"
#include "base/thread_state.h"
#include "guards/extension_ops.h"

namespace memmgr::pager {

namespace {

using at::TensorBase;
using Hook = std::function<TensorBase(const TensorBase&)>;
using Interface = at::impl::VariableHooksInterface;

struct GuardedHook {
  TensorBase operator()(const TensorBase& gradient) const {
    if (!session->open.load() || tl_running_recipes > 0 || !thread_is_seen()) return hook(gradient);
    ForeignCall call(*session);
    if (gradient.defined()) call.frame.tensor(gradient.unsafeGetTensorImpl(), true);
    call.begin();
    return hook(gradient);
  }
  Session* session;
  Hook hook;
};

// Forwards torch's calls to autograd. No function is marked `override`: if a version of torch adds a pure function this
// class is abstract. Hooks are then not guarded, and memmgr works otherwise.
class Guarding : public Interface {
 public:
  Guarding(Session& session, Interface* torch) : session_(session), torch_(torch) {}

  unsigned _register_hook(const TensorBase& t, Hook hook) const {
    return torch_->_register_hook(t, hook ? GuardedHook{&session_, std::move(hook)} : Hook());
  }

  TensorBase tensor_data(const TensorBase& t) const { return torch_->tensor_data(t); }
  TensorBase variable_data(const TensorBase& t) const { return torch_->variable_data(t); }
  // A shared_ptr up to torch 2.12, an intrusive_ptr from 2.13 on.
  decltype(std::declval<const Interface&>().grad_fn(std::declval<const TensorBase&>())) grad_fn(
      const TensorBase& t) const {
    return torch_->grad_fn(t);
  }
  void remove_hook(const TensorBase& t, unsigned place) const { torch_->remove_hook(t, place); }
  bool is_view(const TensorBase& t) const { return torch_->is_view(t); }
  const TensorBase& base(const TensorBase& t) const { return torch_->base(t); }
  const std::string& name(const TensorBase& t) const { return torch_->name(t); }
  bool is_leaf(const TensorBase& t) const { return torch_->is_leaf(t); }
  int64_t output_nr(const TensorBase& t) const { return torch_->output_nr(t); }
  void set_data(const TensorBase& t, const TensorBase& data) const { torch_->set_data(t, data); }
  TensorBase data(const TensorBase& t) const { return torch_->data(t); }
  int64_t _version(const TensorBase& t) const { return torch_->_version(t); }
  void retain_grad(const TensorBase& t) const { torch_->retain_grad(t); }
  bool retains_grad(const TensorBase& t) const { return torch_->retains_grad(t); }
  void _backward(const at::Tensor& t, at::TensorList inputs, const std::optional<at::Tensor>& gradient,
                 std::optional<bool> keep_graph, bool create_graph) const {
    torch_->_backward(t, inputs, gradient, keep_graph, create_graph);
  }
  void requires_grad_(const TensorBase& t, bool on) const { torch_->requires_grad_(t, on); }
  void basic_autograd_not_implemented_fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                                               torch::jit::Stack* stack) const {
    torch_->basic_autograd_not_implemented_fallback(op, keys, stack);
  }
  std::optional<c10::ScalarType> grad_dtype(const TensorBase& t) const { return torch_->grad_dtype(t); }
  void set_grad_dtype(const TensorBase& t, const std::optional<c10::ScalarType>& dtype) const {
    torch_->set_grad_dtype(t, dtype);
  }

 private:
  Session& session_;
  Interface* torch_;
};

template <class T>
void put_in_place(Session& session) {
  if constexpr (!std::is_abstract_v<T>) at::impl::SetVariableHooks(new T(session, at::impl::GetVariableHooks()));
}

}  // namespace

void guard_new_hooks(Session& session) { put_in_place<Guarding>(session); }

void guard_hooks_of(Session& session, const at::Tensor& t) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(t);
  if (!meta || !meta->cpp_hooks_list_) return;
  for (Hook& hook : *meta->cpp_hooks_list_)
    if (hook && !hook.target<GuardedHook>()) hook = GuardedHook{&session, std::move(hook)};
}

}  // namespace memmgr::pager
