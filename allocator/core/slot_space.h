// SlotSpace: which bytes of a tier's file, or of its page-locked memory, are free. Address-ordered best fit with
// coalescing, as in the arena; a plain ordered map will do, because every operation here is followed by a copy.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>

namespace memmgr {

class SlotSpace {
 public:
  static constexpr uint64_t kNone = UINT64_MAX;

  // The offset of `bytes` that are now taken, or kNone.
  uint64_t Take(uint64_t bytes) {
    const auto fit = by_size_.lower_bound({bytes, 0});
    if (fit == by_size_.end()) return kNone;
    const auto [run_bytes, offset] = *fit;
    Remove(offset, run_bytes);
    if (run_bytes > bytes) Add(offset + bytes, run_bytes - bytes);
    return offset;
  }

  void Give(uint64_t offset, uint64_t bytes) {
    auto after = by_offset_.lower_bound(offset);
    if (after != by_offset_.end() && after->first == offset + bytes && !walls_.contains(after->first)) {
      const uint64_t after_bytes = after->second;
      Remove(offset + bytes, after_bytes);
      bytes += after_bytes;
    }
    after = by_offset_.lower_bound(offset);
    if (after != by_offset_.begin() && !walls_.contains(offset)) {
      const auto [before, before_bytes] = *std::prev(after);
      if (before + before_bytes == offset) {
        Remove(before, before_bytes);
        offset = before;
        bytes += before_bytes;
      }
    }
    Add(offset, bytes);
  }

  // Free bytes on both sides of a wall stay two runs. To be set while the bytes on one side are not free.
  void AddWall(uint64_t offset) { walls_.insert(offset); }
  void RemoveWall(uint64_t offset) { walls_.erase(offset); }
  // Takes a whole run: bytes that were given, and none beside them that are free, but for walls.
  void Withdraw(uint64_t offset, uint64_t bytes) { Remove(offset, bytes); }

  // The free bytes at the end of the file: growing the file need not add these.
  uint64_t FreeAtEnd(uint64_t file_bytes) const {
    if (by_offset_.empty()) return 0;
    const auto& [offset, bytes] = *by_offset_.rbegin();
    return offset + bytes == file_bytes ? bytes : 0;
  }

 private:
  void Add(uint64_t offset, uint64_t bytes) {
    by_offset_[offset] = bytes;
    by_size_.insert({bytes, offset});
  }
  void Remove(uint64_t offset, uint64_t bytes) {
    by_offset_.erase(offset);
    by_size_.erase({bytes, offset});
  }

  std::map<uint64_t, uint64_t> by_offset_;
  std::set<std::pair<uint64_t, uint64_t>> by_size_;
  std::set<uint64_t> walls_;
};

}  // namespace memmgr
