// A double for tests/pager/threads_stress.cpp: storages that count their references as torch 2.13 does, in one word with
// the mark of a Python object. When only that object is left, torch takes the GIL.
#pragma once

#include <c10/macros/Macros.h>

#include <atomic>
#include <cstdint>
#include <utility>

namespace c10 {

namespace detail {
constexpr uint64_t kReferenceCountOne = 1;
constexpr uint64_t kHasPyObject = uint64_t{1} << 63;
inline uint32_t refcount(uint64_t counts) { return static_cast<uint32_t>(counts); }
inline bool has_pyobject(uint64_t counts) { return counts & kHasPyObject; }
}  // namespace detail

class intrusive_ptr_target {
 public:
  uint64_t counts() const { return combined_refcount_.load(std::memory_order_acquire); }
  void set_counts(uint64_t counts) { combined_refcount_.store(counts, std::memory_order_release); }
  // Returns the counts that are left.
  uint64_t decref() {
    return combined_refcount_.fetch_sub(detail::kReferenceCountOne, std::memory_order_acq_rel) -
           detail::kReferenceCountOne;
  }

 private:
  std::atomic<uint64_t> combined_refcount_{0};
};

struct StorageImpl : intrusive_ptr_target {
  uint64_t bytes = 0;  // written before it is published, and when it ends
};

}  // namespace c10

namespace memmgr::pager {

// Called when a Python object is the only holder that is left.
void only_python_is_left(c10::StorageImpl* storage);

class StoragePtr {
 public:
  StoragePtr() = default;
  StoragePtr(StoragePtr&& other) noexcept : storage_(other.release()) {}
  StoragePtr& operator=(StoragePtr&& other) noexcept {
    std::swap(storage_, other.storage_);
    return *this;
  }
  ~StoragePtr() {
    if (!storage_) return;
    const uint64_t left = storage_->decref();
    if (c10::detail::refcount(left) == 1 && c10::detail::has_pyobject(left)) only_python_is_left(storage_);
  }
  static StoragePtr reclaim(c10::StorageImpl* storage) {
    StoragePtr owns;
    owns.storage_ = storage;
    return owns;
  }
  c10::StorageImpl* get() const { return storage_; }
  c10::StorageImpl* release() { return std::exchange(storage_, nullptr); }
  explicit operator bool() const { return storage_; }

 private:
  c10::StorageImpl* storage_ = nullptr;
};

struct WeakStorage {
  c10::StorageImpl* target = nullptr;
  c10::StorageImpl* _unsafe_get_target() const { return target; }
};

}  // namespace memmgr::pager
