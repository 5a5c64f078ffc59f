#include "touched.h"

#include <new>

namespace memmgr {

TouchedSets::TouchedSets() : masks_{0, ~StreamMask{0}}, ids_{{0, 0}, {~StreamMask{0}, kEverything}} {}

// Without ids or memory waits are longer than needed, never shorter.
TouchedId TouchedSets::Add(StreamMask mask, std::unordered_map<StreamMask, TouchedId>* to) noexcept {
  if (masks_.size() == kMaxSets) return kEverything;
  try {
    if (masks_.size() == masks_.capacity()) masks_.reserve(2 * masks_.size());
    const auto id = static_cast<TouchedId>(masks_.size());
    to->emplace(mask, id);
    masks_.push_back(mask);
    return id;
  } catch (const std::bad_alloc&) {
    return kEverything;
  }
}

TouchedId TouchedSets::Find(StreamMask mask) noexcept {
  const auto found = ids_.find(mask);
  last_id_ = found != ids_.end() ? found->second : Add(mask, &ids_);
  last_mask_ = mask;
  return last_id_;
}

TouchedId TouchedSets::Fenced(StreamMask mask) noexcept {
  if (mask == 0) return 0;
  const auto found = fenced_.find(mask);
  return found != fenced_.end() ? found->second : Add(mask, &fenced_);
}

void TouchedSets::EmptyFenced() noexcept {
  for (const auto& [mask, id] : fenced_) masks_[id] = 0;
  fenced_.clear();
}

}  // namespace memmgr
