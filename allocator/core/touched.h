// Touched sets: which streams' queued work may still use a piece of memory (device.h). A block has room for 16 bits, so
// the sets are interned: an id stands for a set, equal sets have equal ids. Not thread-safe: the arena's lock guards
// it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace memmgr {

// One bit per stream. The last two stand for more than one: see device.h.
using StreamMask = uint64_t;
using TouchedId = uint16_t;  // 0: no stream

// When the streams of a touched set were last told to use the memory, on the device's clock of marks (device.h).
// Streams are of three kinds: the program's, and memmgr's own, which are told apart by which of two they are. A
// stream's time is that of its kind; the times of kinds that are not in the set mean nothing.
constexpr size_t kStreamKinds = 3;
constexpr uint64_t kTail = ~uint64_t{0};  // not known: the tail counts

struct StreamTimes {
  std::array<uint64_t, kStreamKinds> at{};

  void Raise(const StreamTimes& other) {
    for (size_t kind = 0; kind < kStreamKinds; ++kind) at[kind] = at[kind] < other.at[kind] ? other.at[kind] : at[kind];
  }
  bool NoLaterThan(const StreamTimes& other) const {
    for (size_t kind = 0; kind < kStreamKinds; ++kind)
      if (at[kind] > other.at[kind]) return false;
    return true;
  }
};

class TouchedSets {
 public:
  static constexpr TouchedId kEverything = 1;  // all bits; also used for a set when there are no more ids

  TouchedSets();

  StreamMask Mask(TouchedId id) const { return masks_[id]; }
  TouchedId Of(StreamMask mask) noexcept { return mask == last_mask_ ? last_id_ : Find(mask); }
  TouchedId Union(TouchedId a, TouchedId b) noexcept {
    if (a == b || b == 0) return a;
    return a == 0 ? b : Of(masks_[a] | masks_[b]);
  }
  uint64_t size() const { return masks_.size(); }

  // An id of its own for the set as it is now: no other piece gets it by Of or Union, and EmptyFenced makes all pieces
  // that have one untouched at once. For a synchronization: touches before it are fenced, touches during it are not.
  TouchedId Fenced(StreamMask mask) noexcept;
  void EmptyFenced() noexcept;

 private:
  static constexpr size_t kMaxSets = 65536;
  TouchedId Find(StreamMask mask) noexcept;
  TouchedId Add(StreamMask mask, std::unordered_map<StreamMask, TouchedId>* to) noexcept;

  std::vector<StreamMask> masks_;
  std::unordered_map<StreamMask, TouchedId> ids_;
  std::unordered_map<StreamMask, TouchedId> fenced_;
  StreamMask last_mask_ = 0;  // one stream does nearly everything
  TouchedId last_id_ = 0;
};

}  // namespace memmgr
