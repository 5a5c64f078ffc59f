// Op signatures, and how they earn trust (rule 8).
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "base/session.h"
#include "cells/types.h"
#include "ops/op_info.h"

namespace memmgr::pager {

struct Family;

enum class Trust : uint8_t {
  kNew,
  kYes,
  kNo,
  // Others of its family were checked, it was not: its results are compared with their checksums when they are
  // restored.
  kFamily,
};

// An op signature: an op with its dtypes, shapes, strides, all other arguments and its numerics.
struct Kind {
  OpInfo* info = nullptr;
  c10::KernelFunction kernel;  // used for later runs, whichever kernel is registered by then
  std::atomic<Trust> trust{Trust::kNew};
  std::atomic<bool> clears{false};  // it leaves bytes of its results unwritten: their memory is cleared first
  std::atomic<uint32_t> checks_without_room{0};  // determinism checks that found no room
  std::atomic<bool> only_beside{false};          // a check in the place of the first result has failed
  std::atomic<uint64_t> needs_bytes{0};          // bytes of a budget in which the last of these would have found room
  std::atomic<double> seconds{-1};               // of one run; -1: not measured
  // Bytes of a result as a bit for each element; 0: a result had more than two values.
  std::atomic<uint64_t> bits_bytes{0};
  Family* family = nullptr;
  bool of_family = false;   // the entry stands for all signatures of its family that are not checked
  uint64_t read_bytes = 0;  // bytes of all its input tensors

  bool trusted() const {
    const Trust now = trust.load(std::memory_order_relaxed);
    return now == Trust::kYes || now == Trust::kFamily;
  }
};

// kOfFamily: only small numbers are told apart.
template <bool kOfFamily>
struct HashOf {
  uint64_t value = 0x243F6A8885A308D3ull;

  void mix(uint64_t v) {
    value = (value ^ v) * 0x9E3779B185EBCA87ull;
    value ^= value >> 32;
  }
  void mix_number(int64_t v, int64_t largest_small = 8) {  // axes, strides, paddings: they choose algorithms
    if (kOfFamily && (v < -largest_small || v > largest_small)) v = v < 0 ? INT64_MIN : INT64_MAX;
    mix(static_cast<uint64_t>(v));
  }
  void mix_number(double v) {
    // For all other numbers.
    if (kOfFamily && !(std::abs(v) <= 8 && std::nearbyint(2 * v) == 2 * v)) v = v < 0 ? -0.3 : 0.3;
    uint64_t bits;
    std::memcpy(&bits, &v, sizeof bits);
    mix(bits);
  }
  // Returns false if no recipe keeps values of this type.
  bool mix_value(const c10::IValue& v) {
    if (v.isNone()) return mix(3), true;
    if (v.isInt()) return mix(5), mix_number(v.toInt()), true;
    if (v.isBool()) return mix(v.toBool() ? 7 : 9), true;
    if (v.isDouble()) return mix(11), mix_number(v.toDouble()), true;
    if (v.isComplexDouble()) {
      const auto z = v.toComplexDouble();
      return mix(13), mix_number(z.real()), mix_number(z.imag()), true;
    }
    if (v.isIntList()) {
      const auto list = v.toIntList();
      mix(15 + 64 * list.size());
      for (const int64_t i : list) mix_number(i);
      return true;
    }
    if (v.isString()) {
      mix(17);
      for (const char c : v.toStringRef()) mix(static_cast<uint64_t>(c));
      return true;
    }
    if (v.isDevice()) {
      const auto d = v.toDevice();
      return mix(static_cast<uint64_t>(19 + 64 * static_cast<int>(d.type()) + d.index())), true;
    }
    if (v.isGenerator()) return mix(21), true;
    if (v.isList()) {
      const auto list = v.toListRef();
      mix(23 + 64 * list.size());
      for (const auto& item : list)
        if (item.isTensor() || !mix_value(item)) return false;
      return true;
    }
    return false;
  }
};

// Returns the signature with this hash, which `recipe` has. It is the family's entry while that stands for it.
Kind* kind_of(const Options& options, uint64_t hash, const Recipe& recipe, const c10::KernelFunction& kernel,
              const void* code);
// Ends a determinism check.
void end_trial(Session& session, Kind* kind, bool same);
// Returns the entries of families that the recipe and its chain rely on. If its result does not match its checksum they
// are trusted no longer: from then on each of their signatures is checked.
std::vector<Kind*> families_of_locked(const Recipe* recipe) REQUIRES(graph_lock());
// Returns the seconds that a run is expected to take, from its family's seconds for each byte.
double seconds_by_family(const Recipe& recipe);
// Records the seconds of one run. A run in less than half the known time counts at once; other runs move it by 5 %.
void note_seconds(Kind* kind, double seconds);

// Returns the seconds of one run, as far as they are known.
inline double seconds_of(const Recipe* r) {
  return std::max(0.0, r->seconds < 0 ? r->kind->seconds.load(std::memory_order_relaxed) : r->seconds);
}
// Returns the largest budget that a signature needs whose check has found no room. Until it is checked its results
// cannot be rematerialized.
uint64_t untried_bytes();
void forget_untried();

}  // namespace memmgr::pager
