// Kinds of ops, and how they earn trust (rule 8).
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "cells/types.h"
#include "ops/op_info.h"

namespace memmgr::pager {

struct Family;

enum class Trust : uint8_t {
  kNew,
  kYes,
  kNo,
  kFamily,  // others of its family were tried, it was not: what it makes is checked when it comes back
};

// An op with its dtypes, shapes, strides, all other arguments and its numerics.
struct Kind {
  OpInfo* info = nullptr;
  c10::KernelFunction kernel;  // runs again, whatever is registered by then
  std::atomic<Trust> trust{Trust::kNew};
  std::atomic<bool> clears{false};       // it leaves bytes of its results alone: the memory for them is cleared first
  std::atomic<uint32_t> trials{0};       // that found no room
  std::atomic<bool> only_beside{false};  // a trial in the place of the first result has failed
  std::atomic<uint64_t> needs_bytes{0};  // a budget in which the last of these would have found it
  std::atomic<double> seconds{-1};       // of one run; -1: not measured
  std::atomic<uint64_t> bits_bytes{0};   // of a result as a bit for each element; 0: one had more than two values
  Family* family = nullptr;
  bool of_family = false;   // all of it that is not tried
  uint64_t read_bytes = 0;  // of all tensors that it is given

  bool trusted() const {
    const Trust now = trust.load(std::memory_order_relaxed);
    return now == Trust::kYes || now == Trust::kFamily;
  }
};

// kOfFamily: only small whole numbers are told from one another.
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
    if (kOfFamily && !(std::abs(v) <= 8 && std::nearbyint(2 * v) == 2 * v)) v = v < 0 ? -0.3 : 0.3;  // any
    uint64_t bits;
    std::memcpy(&bits, &v, sizeof bits);
    mix(bits);
  }
  // False where the value is of a sort that no recipe keeps.
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

// The kind with this hash, which `recipe` is of. Its family's own, while that speaks for it.
Kind* kind_of(uint64_t hash, const Recipe& recipe, const c10::KernelFunction& kernel, const void* code);
// It was run twice.
void end_trial(Kind* kind, bool same);
// What came of it was not what it had been: from now on each kind is tried of the families that it and its chain trust.
void refuse_families_locked(const Recipe* recipe);
// What others of its family took, by their bytes.
double seconds_by_family(const Recipe& recipe);
// What one run took; a kind believes its faster runs.
void note_seconds(Kind* kind, double seconds);

// Of one run, as far as is known.
inline double seconds_of(const Recipe* r) {
  return std::max(0.0, r->seconds < 0 ? r->kind->seconds.load(std::memory_order_relaxed) : r->seconds);
}
// The largest budget that a kind needs that found no room for its trial; what it makes stays until it does.
uint64_t untried_bytes();
void forget_untried();

}  // namespace memmgr::pager
