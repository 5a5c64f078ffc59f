// Large storages of the managed device in memory of another library (NumPy, Arrow, DLPack) or in memory that processes
// share. They cannot be evicted, since other code has their addresses. They count against the budget from the first op
// that touches them until they end.
//
// Known limitation: the end of a storage is found at the next look, which each request for room takes.
#pragma once

#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <optional>

#include "base/session.h"

namespace memmgr::pager {

enum class Owner : uint8_t { kLibrary, kShared, kMappedFile };
constexpr size_t kOwners = 3;

// Does nothing if the storage is small, is a cell or can become one.
void count_fixed(const Session& session, c10::StorageImpl* s);
// Does the same in two steps, for a caller that makes room between them. Null: it is not counted.
std::optional<Owner> owner_of_fixed(const Session& session, const c10::StorageImpl* s);
void count_fixed(const Session& session, c10::StorageImpl* s, Owner owner);
bool takes_room(Owner owner);
bool is_counted_as_fixed(const c10::StorageImpl* s);
void look_for_ended_fixed();
void forget_fixed();  // when a budget ends
// Bytes by owner. The kernel can take back the pages of a file that other processes have mapped, too: such bytes are
// reported and do not count.
struct FixedBytes {
  uint64_t of[kOwners] = {};
};
FixedBytes fixed_bytes();

}  // namespace memmgr::pager
