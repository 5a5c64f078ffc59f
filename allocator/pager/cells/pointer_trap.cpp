#include "cells/pointer_trap.h"

#include <cstdio>
#include <cstring>

#include "base/private_member.h"
#include "base/tensors.h"

namespace memmgr::pager {

void (*on_foreign_write)(c10::StorageImpl* s) = nullptr;
std::atomic<bool> without_trap{false};

// Private members that have no accessor: the pointer without its context, a count without the GIL.
MEMMGR_PRIVATE_MEMBER(PointerOfDataPtr, at::DataPtr, ptr_)
MEMMGR_PRIVATE_MEMBER(DataOfUniquePtr, c10::detail::UniqueVoidPtr, data_)

static void set_data(at::DataPtr& p, void* data) {
  (p.*private_member(PointerOfDataPtr())).*private_member(DataOfUniquePtr()) = data;
}

static constexpr char kTrap[] = "memmgr: the bytes of this tensor are not in memory at this moment [cell 0x";

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
static void clear_trap(c10::StorageImpl* s) { s->clear_data_ptr_access_error_msg_(); }
#else
// Only 2.13 takes the trap off again.
MEMMGR_PRIVATE_MEMBER(TrapOfStorage, c10::StorageImpl, throw_on_immutable_data_ptr_)
static void clear_trap(c10::StorageImpl* s) {
  s->*private_member(TrapOfStorage()) = false;
  s->set_data_ptr_noswap(std::move(pointer_of(s)));  // moved to itself: torch computes anew which accesses it checks
}
#endif

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
void watch_writes(const Cell* c) {
  auto* s = c->storage._unsafe_get_target();
  if (!s || s->has_materializer()) return;
  try {
    s->set_materializer(on_foreign_write);
  } catch (const c10::Error&) {
    // Another thread has just done the same.
  }
}
void unwatch_writes(c10::StorageImpl* s) { s->clear_materializer(); }
#else
void watch_writes(const Cell*) {}
void unwatch_writes(c10::StorageImpl*) {}
#endif

void show_bytes(c10::StorageImpl* s, void* data, const Cell* c) {
  if (data) {
    set_data(pointer_of(s), data);
    clear_trap(s);
    return;
  }
  if (C10_UNLIKELY(without_trap.load(std::memory_order_relaxed))) {
    set_data(pointer_of(s), nullptr);
    clear_trap(s);
    return;
  }
  char text[320];
  std::snprintf(text, sizeof text,
                "%s%llx]: something reads it that is no torch operation. Read it through torch (tensor.clone(), "
                "tensor.numpy(), tensor.tolist() bring it back).",
                kTrap, static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(c)));
  s->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(text));
  std::atomic_thread_fence(std::memory_order_seq_cst);
  set_data(pointer_of(s), nullptr);
}

uint64_t trapped_cell(const char* what) {
  const char* at = std::strstr(what, kTrap);
  return at ? std::strtoull(at + sizeof kTrap - 1, nullptr, 16) : 0;
}

}  // namespace memmgr::pager
