#include "ops/rng.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <cstring>

#include "base/gil.h"
#include "base/lock.h"
#include "pools/pool.h"
#include "pools/stream_rules.h"

namespace memmgr::pager {

static Lock& drawing_lock() {
  static Lock& lock = lock_of(LockId::kDrawing);
  return lock;
}

static thread_local bool tl_drawing = false;

void Drawing::unlock() {
  owns_ = false;
  drawing_lock().unlock();
  tl_drawing = false;
}

// The owner of the lock may need the GIL, so no thread waits for the lock with the GIL.
Drawing begin_drawing() {
  if (tl_drawing) return {};
  if (!drawing_lock().try_lock()) {
    const WithoutGil released;
    drawing_lock().lock();
  }
  tl_drawing = true;
  return Drawing(true);
}

namespace {

enum class Variant { kNone, kArgument, kOverload, kUniform, kNormal, kDropout, kState };

// Returns the overload that takes a generator. The place of the generator is read from its schema.
const char* overload_with_generator(const c10::OperatorName& name) {
  const auto is = [&](const char* op, const char* overload) {
    return name.name == op && name.overload_name == overload;
  };
  if (is("aten::rand", "") || is("aten::randn", "") || is("aten::randint", "") || is("aten::randperm", ""))
    return "generator";
  if (is("aten::randint", "low")) return "low_generator";
  return nullptr;
}

bool on_cuda(const Pool& pool) { return queues && pool.device.type() == c10::kCUDA; }

Variant way_of(const Pool& pool, const OpInfo* info) {
  if (info->generator >= 0) return Variant::kArgument;
  if (on_cuda(pool)) return Variant::kState;
  const auto& name = info->op.operator_name();
  if (overload_with_generator(name)) return Variant::kOverload;
  if (name.name == "aten::rand_like") return Variant::kUniform;
  if (name.name == "aten::randn_like") return Variant::kNormal;
  if (name.name == "aten::native_dropout") return Variant::kDropout;
  return Variant::kNone;
}

at::Tensor empty_like_of(const torch::jit::Stack& stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::empty_like", "");
  torch::jit::Stack call(stack.begin(), stack.end());
  op.callBoxed(&call);
  return call[0].toTensor();
}

}  // namespace

bool can_draw_again(const Pool& pool, const OpInfo* info) { return way_of(pool, info) != Variant::kNone; }

// Returns the managed device's generator. Test devices draw from the CPU's.
static at::Generator default_generator(const Pool& pool) {
  if (on_cuda(pool)) return at::globalContext().defaultGenerator(pool.device);
  return at::detail::getDefaultCPUGenerator();
}

at::Generator generator_before(const Pool& pool, const OpInfo* info, const c10::IValue* args) {
  at::Generator used;
  if (info->generator >= 0 && args[info->generator].isGenerator()) used = args[info->generator].toGenerator();
  if (!used.defined()) used = default_generator(pool);
  std::lock_guard<std::mutex> lock(used.mutex());
  return used.clone();
}

void draw_again(const Pool& pool, const OpInfo* info, const c10::KernelFunction& kernel, c10::DispatchKeySet keys,
                const at::Generator& state, torch::jit::Stack* stack) {
  at::Generator g = state.clone();
  switch (way_of(pool, info)) {
    case Variant::kArgument:
      (*stack)[static_cast<size_t>(info->generator)] = g;
      kernel.callBoxed(info->op, keys, stack);
      return;
    case Variant::kOverload: {
      const auto& name = info->op.operator_name();
      const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.name.c_str(), overload_with_generator(name));
      const auto& arguments = op.schema().arguments();
      for (size_t i = 0; i < arguments.size(); ++i)
        if (arguments[i].name() == "generator") stack->insert(stack->begin() + static_cast<ptrdiff_t>(i), g);
      op.redispatchBoxed(keys, stack);
      return;
    }
    case Variant::kUniform:
    case Variant::kNormal: {
      at::Tensor out = empty_like_of(*stack);
      if (way_of(pool, info) == Variant::kUniform)
        out.uniform_(0, 1, g);
      else
        out.normal_(0, 1, g);
      stack->clear();
      stack->emplace_back(std::move(out));
      return;
    }
    case Variant::kDropout: {
      // As ATen's native_dropout_cpu computes it.
      const at::Tensor input = (*stack)[0].toTensor();
      const double p = (*stack)[1].toDouble();
      const bool train = (*stack)[2].isNone() || (*stack)[2].toBool();
      at::Tensor mask, output;
      if (input.numel() == 0 || !train || p == 0) {
        kernel.callBoxed(info->op, keys, stack);
        return;
      }
      const double p1m = 1. - p;
      const double scale = p1m == 0 ? 0. : 1. / p1m;
      mask = at::empty_like(input, input.options().dtype(c10::CppTypeToScalarType<bool>::value));
      mask.bernoulli_(p1m, g);
      output = input.mul(mask).mul_(scale);
      stack->clear();
      stack->emplace_back(std::move(output));
      stack->emplace_back(std::move(mask));
      return;
    }
    case Variant::kState: {
      // Works for any op. The state is two numbers, which the default generator uses by pointer until the op has drawn.
      // Setting a seed would also restart cuDNN's dropout.
      const Drawing nobody_else = begin_drawing();
      struct Lent {
        Lent(at::Generator generator, const at::Generator& state) : own(std::move(generator)) {
          own.graphsafe_set_state(state);
        }
        ~Lent() { own.graphsafe_set_state(before); }
        at::Generator own;
        const at::Generator before = own.graphsafe_get_state();
      } lent(default_generator(pool), g);
      kernel.callBoxed(info->op, keys, stack);
      return;
    }
    case Variant::kNone:
      break;
  }
  TORCH_CHECK(false, "memmgr: ", info->op.schema().name(), " cannot draw again");
}

}  // namespace memmgr::pager
