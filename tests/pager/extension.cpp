// Accesses of extensions behind the dispatcher: they take an address, allocate through torch, and go on with the
// address.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/custom_class.h>
#include <torch/library.h>

namespace {

// A megabyte of other numbers, through torch: a cell has to be evicted for it.
void allocate() {
  at::Tensor scratch = at::empty({1 << 18});
  std::fill_n(scratch.data_ptr<float>(), scratch.numel(), -1e6f);
}

double sum(const float* p, int64_t n) {
  double total = 0;
  for (int64_t i = 0; i < n; ++i) total += p[i];
  return total;
}

double sum_const(const at::Tensor& t) {
  const float* p = t.const_data_ptr<float>();
  allocate();
  return sum(p, t.numel());
}

double sum_mutable(const at::Tensor& t) {
  const float* p = t.data_ptr<float>();
  allocate();
  return sum(p, t.numel());
}

double sum_list(const std::vector<at::Tensor>& all, const std::map<std::string, at::Tensor>& named) {
  double total = 0;
  for (const at::Tensor& t : all) total += sum_const(t);
  for (const auto& [name, t] : named) total += sum_const(t);
  return total;
}

void fill(at::Tensor t, float value) {
  float* p = t.data_ptr<float>();
  allocate();
  std::fill_n(p, t.numel(), value);
}

// Between two ops that read it, without the first one's result being affected.
at::Tensor write_between(at::Tensor t) {
  at::Tensor before = at::mul(t, 2);
  std::fill_n(t.data_ptr<float>(), t.numel(), 5.f);
  return before;
}

at::Tensor own_zeros(int64_t n) {
  at::Tensor t = at::zeros({n});
  float* p = t.data_ptr<float>();
  allocate();
  std::fill_n(p, n, 3.f);
  return t;
}

struct Holder {
  explicit Holder(at::Tensor t) : held(std::move(t)) {}
  double total() const {
    const at::Tensor twice = at::mul(held, 2);
    const float* p = twice.const_data_ptr<float>();
    const float* q = held.view({-1}).const_data_ptr<float>();
    allocate();
    return sum(p, twice.numel()) - sum(q, held.numel());
  }
  at::Tensor held;
};

// Called by TorchBind, which passes neither pybind11's functions nor the dispatcher.
struct Bound : torch::CustomClassHolder {
  explicit Bound(at::Tensor t) : kept(std::move(t)), seen(sum_const(kept)) {}
  double sum(const at::Tensor& t) { return sum_const(t); }
  double sum_kept() { return sum_const(kept); }
  at::Tensor kept;
  double seen;
};

at::Tensor op_sum(const at::Tensor& t) {
  at::Tensor out = at::empty({1}, t.options().dtype(at::kDouble));
  out.data_ptr<double>()[0] = sum_const(t);
  return out;
}

// Sum of the tensor that it was last given to keep.
at::Tensor op_sum_of_kept(const at::Tensor& t, bool keep) {
  static auto* kept = new at::Tensor;
  const at::Tensor out = op_sum(kept->defined() ? *kept : t);
  *kept = keep ? t : at::Tensor();
  return out;
}

void op_fill(const at::Tensor& t, double value) { fill(t, static_cast<float>(value)); }

struct Square : torch::autograd::Function<Square> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x) {
    ctx->save_for_backward({x});
    const float* p = x.const_data_ptr<float>();
    at::Tensor y = at::empty(x.sizes());
    float* q = y.data_ptr<float>();
    allocate();
    for (int64_t i = 0; i < x.numel(); ++i) q[i] = p[i] * p[i];
    return y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const at::Tensor x = ctx->get_saved_variables()[0];
    const at::Tensor g = grads[0].contiguous();
    const float *p = x.const_data_ptr<float>(), *d = g.const_data_ptr<float>();
    at::Tensor y = at::empty(x.sizes());
    float* q = y.data_ptr<float>();
    allocate();
    for (int64_t i = 0; i < x.numel(); ++i) q[i] = 2 * p[i] * d[i];
    return {y};
  }
};

at::Tensor square(const at::Tensor& x) { return Square::apply(x); }

// Reads it by address before and after `between`, which is Python's.
void hook(const at::Tensor& t, const std::function<void(at::Tensor)>& between) {
  t.register_hook([between](const at::Tensor& gradient) {
    const float* p = gradient.const_data_ptr<float>();
    const double before = sum(p, gradient.numel());
    between(gradient);
    TORCH_CHECK(before == sum(p, gradient.numel()), "the gradient has left");
    return gradient;
  });
}

}  // namespace

TORCH_LIBRARY(memmgr_test, m) {
  m.def("sum(Tensor t) -> Tensor");
  m.def("sum_of_kept(Tensor t, bool keep) -> Tensor");
  m.def("fill(Tensor t, float value) -> ()");
  m.def("composite(Tensor t) -> Tensor", &op_sum);
  m.def("square(Tensor t) -> Tensor");
  m.class_<Bound>("Bound")
      .def(torch::init<at::Tensor>())
      .def("sum", &Bound::sum)
      .def("sum_kept", &Bound::sum_kept)
      .def("seen", [](const c10::intrusive_ptr<Bound>& self) { return self->seen; })
      .def_pickle([](const c10::intrusive_ptr<Bound>& self) { return self->kept; },
                  [](at::Tensor state) { return c10::make_intrusive<Bound>(std::move(state)); });
}
TORCH_LIBRARY_IMPL(memmgr_test, CPU, m) {
  m.impl("sum", &op_sum);
  m.impl("sum_of_kept", &op_sum_of_kept);
  m.impl("fill", &op_fill);
}
TORCH_LIBRARY_IMPL(memmgr_test, Autograd, m) { m.impl("square", &square); }

PYBIND11_MODULE(memmgr_test_extension, m) {
  m.def("sum_const", &sum_const);
  m.def("sum_mutable", &sum_mutable);
  m.def("sum_released", &sum_const, py::call_guard<py::gil_scoped_release>());
  m.def("sum_list", &sum_list, py::arg("all"), py::arg("named"));
  m.def("fill", &fill, py::arg("t"), py::arg("value"));
  m.def("write_between", &write_between);
  m.def("own_zeros", &own_zeros);
  m.def("makes_sum", [] { return std::function<double(at::Tensor)>(&sum_const); });
  m.def("makes_sums", [] { return std::vector<std::function<double(at::Tensor)>>(2, &sum_const); });
  m.def("hook", &hook);
  m.def("fails", [](const at::Tensor& t) { TORCH_CHECK(false, "as it should"); });
  py::class_<Holder>(m, "Holder").def(py::init<at::Tensor>()).def("total", &Holder::total);
}

// Called below all observers: a write that no op declares.
extern "C" void memmgr_test_poke(void* storage, long index, float value) {
  static_cast<float*>(static_cast<c10::StorageImpl*>(storage)->mutable_data())[index] = value;
}
