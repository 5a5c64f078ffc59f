#include "ops/numerics.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <torch/headeronly/version.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <array>
#include <cstdint>
#include <cstring>
#include <deque>

#include "base/lock.h"
#include "base/no_destructor.h"
#include "base/private_member.h"
#include "base/seen_threads.h"

namespace memmgr::pager {

// The float32 precisions by backend and op. Reading them through torch's functions, with their inheritance, took a
// quarter of a recorded op's time. All keys exist from the beginning, so the addresses of the values do not change.
MEMMGR_PRIVATE_MEMBER(PrecisionsOfContext, at::Context, fp32_precision)
// The first of the context's switches. The members before it record the parts that were initialized.
MEMMGR_PRIVATE_MEMBER(FirstOfContext, at::Context, enabled_cudnn)

namespace {

constexpr size_t kPrecisions = 9;
constexpr int16_t kDenormals = static_cast<int16_t>(0x8040);  // flush to zero, denormals are zero
constexpr size_t kOthers = 22;
constexpr size_t kMostOfContext = 256;  // bytes
using Switches = std::array<int16_t, kOthers + kPrecisions>;

const std::array<at::Float32Precision*, kPrecisions>& precisions() {
  static const auto all = [] {
    std::array<at::Float32Precision*, kPrecisions> found{};
    auto& known = at::globalContext().*private_member(PrecisionsOfContext());
    TORCH_INTERNAL_ASSERT(known.size() == kPrecisions);
    size_t i = 0;
    for (auto& entry : known) found[i++] = &entry.second;
    return found;
  }();
  return all;
}

int16_t modes_now() {
  int16_t modes = c10::GradMode::is_enabled() ? 1 : 0;  // oneDNN's LSTM makes its workspace only with gradient
#if defined(__x86_64__)
  modes |= static_cast<int16_t>(_mm_getcsr() & kDenormals);
#endif
  return modes;
}

Switches read_switches() {
  const at::Context& c = at::globalContext();
  Switches s{c.userEnabledCuDNN(),
             c.benchmarkCuDNN(),
             c.deterministicCuDNN(),
             c.userEnabledMkldnn(),
             c.deterministicMkldnn(),
             c.deterministicAlgorithms(),
             c.deterministicAlgorithmsWarnOnly(),
             c.deterministicFillUninitializedMemory(),
             c.userEnabledFlashSDP(),
             c.userEnabledMemEfficientSDP(),
             c.userEnabledMathSDP(),
             c.userEnabledCuDNNSDP(),
             c.allowFP16ReductionCPU(),
             static_cast<int16_t>(at::get_num_threads()),
             modes_now(),
             static_cast<int16_t>(c10::get_default_dtype().toScalarType()),
             static_cast<int16_t>(c.allowFP16ReductionCuBLAS()),
             static_cast<int16_t>(c.allowBF16ReductionCuBLAS()),
             c.allowFP16AccumulationCuBLAS(),
             static_cast<int16_t>(at::globalContext().blasPreferredBackend()),
             static_cast<int16_t>(c.linalgPreferredBackend()),
             c.userEnabledNNPACK()};
  const auto& float32 = precisions();
  for (size_t i = 0; i < kPrecisions; ++i) s[kOthers + i] = static_cast<int16_t>(*float32[i]);
  return s;
}

void write_switches(const Switches& now, const Switches& then) {
  at::Context& c = at::globalContext();
  const auto differs = [&](size_t i) { return now[i] != then[i]; };
  if (differs(0)) c.setUserEnabledCuDNN(then[0]);
  if (differs(1)) c.setBenchmarkCuDNN(then[1]);
  if (differs(2)) c.setDeterministicCuDNN(then[2]);
  if (differs(3)) c.setUserEnabledMkldnn(then[3]);
  if (differs(4)) c.setDeterministicMkldnn(then[4]);
  if (differs(5) || differs(6)) c.setDeterministicAlgorithms(then[5], then[6]);
  if (differs(7)) c.setDeterministicFillUninitializedMemory(then[7]);
  if (differs(8)) c.setSDPUseFlash(then[8]);
  if (differs(9)) c.setSDPUseMemEfficient(then[9]);
  if (differs(10)) c.setSDPUseMath(then[10]);
  if (differs(11)) c.setSDPUseCuDNN(then[11]);
  if (differs(12)) c.setAllowFP16ReductionCPU(then[12]);
  if (differs(13)) at::set_num_threads(static_cast<int>(then[13]));
  if (differs(14)) {
    c.setFlushDenormal((then[14] & kDenormals) != 0);
    c10::GradMode::set_enabled((then[14] & 1) != 0);
  }
  if (differs(15)) c10::set_default_dtype(c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(then[15])));
  // 0: reduced precision and split-K are allowed, 1: split-K only, 2: neither.
  if (differs(16)) c.setAllowFP16ReductionCuBLAS(then[16] == 0, then[16] < 2);
  if (differs(17)) c.setAllowBF16ReductionCuBLAS(then[17] == 0, then[17] < 2);
  if (differs(18)) c.setAllowFP16AccumulationCuBLAS(then[18]);
  if (differs(19)) c.setBlasPreferredBackend(static_cast<at::BlasBackend>(then[19]));
  if (differs(20)) c.setLinalgPreferredBackend(static_cast<at::LinalgBackend>(then[20]));
  if (differs(21)) c.setUserEnabledNNPACK(then[21]);
  for (size_t i = 0; i < kPrecisions; ++i)
    if (differs(kOthers + i)) *precisions()[i] = static_cast<at::Float32Precision>(then[kOthers + i]);
}

struct Interned {
  Lock& lock = lock_of(LockId::kNumerics);
  std::deque<Switches> all GUARDED_BY(lock);  // addresses stay valid
};

NoDestructor<Interned> interned;

const Switches& switches_of(int id) {
  Interned& known = *interned;
  const Hold lock(known.lock);
  return known.all[static_cast<size_t>(id)];
}

// All bytes that read_switches() depends on, as they lie in memory: reading one switch after another took a twentieth
// of a recorded op's time.
struct Seen {
  std::array<char, kMostOfContext> context{};
  std::array<at::Float32Precision, kPrecisions> float32{};
  int threads = 0;
  caffe2::TypeMeta dtype;
  int16_t modes = 0;
  int id = -1;
};

struct SwitchBytes {
  const char* first;
  size_t size;
};

SwitchBytes switch_bytes() {
  const at::Context& context = at::globalContext();
  const auto* first = reinterpret_cast<const char*>(&(context.*private_member(FirstOfContext())));
  const auto size = static_cast<size_t>(reinterpret_cast<const char*>(&context + 1) - first);
  TORCH_INTERNAL_ASSERT(size <= kMostOfContext);
  return {first, size};
}

C10_NOINLINE Seen& last_seen() {  // not inlined: the compiler would look up the thread's address at each use
  static thread_local Seen seen;
  return seen;
}

int intern(const Switches& now) {
  Interned& known = *interned;
  const Hold lock(known.lock);
  for (size_t i = 0; i < known.all.size(); ++i)
    if (known.all[i] == now) return static_cast<int>(i);
  known.all.push_back(now);
  return static_cast<int>(known.all.size()) - 1;
}

}  // namespace

int numerics_now() {
  static const SwitchBytes bytes = switch_bytes();
  Seen& seen = last_seen();
  const int threads = at::get_num_threads();
  const caffe2::TypeMeta dtype = c10::get_default_dtype();
  const int16_t modes = modes_now();
  const auto& float32 = precisions();
  bool same = seen.id >= 0 && seen.threads == threads && seen.modes == modes && seen.dtype == dtype &&
              std::memcmp(seen.context.data(), bytes.first, bytes.size) == 0;
  for (size_t i = 0; i < kPrecisions; ++i) same &= seen.float32[i] == *float32[i];
  if (C10_LIKELY(same)) return seen.id;
  // Copied before the switches are read: a change by another thread in between is found at the next call.
  std::memcpy(seen.context.data(), bytes.first, bytes.size);
  for (size_t i = 0; i < kPrecisions; ++i) seen.float32[i] = *float32[i];
  seen.threads = threads;
  seen.dtype = dtype;
  seen.modes = modes;
  return seen.id = intern(read_switches());
}

NumericsGuard::NumericsGuard(int id) {
  const int now = numerics_now();
  if (now == id) return;
  before_ = now;
  write_switches(switches_of(now), switches_of(id));
}

NumericsGuard::~NumericsGuard() {
  if (before_ >= 0) write_switches(read_switches(), switches_of(before_));
}

}  // namespace memmgr::pager
