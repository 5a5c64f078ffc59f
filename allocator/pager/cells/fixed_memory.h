// Large storages of the managed device in memory of another library (NumPy, Arrow, DLPack) or in memory that processes
// share. It cannot leave, since others have its address. It counts against the budget from the
// first op that touches it until its storage ends.
//
// Known limitation: that a storage has ended is found at the next look, which each request for room takes.
#pragma once

#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <optional>

namespace memmgr::pager {

enum class Owner : uint8_t { kLibrary, kShared, kMappedFile };
constexpr size_t kOwners = 3;

// Does nothing if the storage is small, is a cell or can become one.
void count_fixed(c10::StorageImpl* s);
// The same in two steps, for a caller that makes room between them. Null: it is not counted.
std::optional<Owner> owner_of_fixed(const c10::StorageImpl* s);
void count_fixed(c10::StorageImpl* s, Owner owner);
bool takes_room(Owner owner);
bool is_counted_as_fixed(const c10::StorageImpl* s);
void look_for_ended_fixed();
void forget_fixed();  // a budget ends
// By owner. Pages of a file that others have mapped are the kernel's to take back: they are named, and do not count.
struct FixedBytes {
  uint64_t of[kOwners] = {};
};
FixedBytes fixed_bytes();

}  // namespace memmgr::pager
