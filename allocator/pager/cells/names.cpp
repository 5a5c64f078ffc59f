#include "cells/names.h"

#include <c10/core/impl/COW.h>

#include <algorithm>
#include <map>
#include <vector>

#include "base/lock.h"
#include "base/mapped_areas.h"
#include "base/no_destructor.h"
#include "base/tensors.h"
#include "cells/cell.h"

namespace memmgr::pager {

namespace {

constexpr uint64_t kFirstNumber = uint64_t{1} << 62;

struct Claim {
  uint64_t nbytes = 0;
  Cell* cell = nullptr;               // null: no cell
  std::vector<WeakStorage> storages;  // without a cell: the named storages over this memory
  uint64_t at = 0;                    // the address where the bytes stay; 0: they may move
};

using Claims = std::map<uint64_t, Claim>;

// Never destroyed: storages outlive statics.
struct Names {
  Claims claims;  // by name
  // The address of claimed memory that does not move -> the claim's name. An entry may be out of date until its claim
  // ends.
  std::map<uint64_t, uint64_t> places;
  uint64_t next_number = kFirstNumber;
};

NoDestructor<Names> names OF_GRAPH;

uint64_t next_number(uint64_t nbytes) REQUIRES(graph_lock()) {
  constexpr uint64_t kPage = 4096;
  const uint64_t number = names->next_number;
  names->next_number += (nbytes + kPage - 1) / kPage * kPage + kPage;
  return number;
}

uint64_t address_of(const c10::StorageImpl* s) { return reinterpret_cast<uintptr_t>(pointer_of(s).get()); }

// Returns true if the claim's storage lives. A storage without a cell ends, or gets other memory, without a call.
bool lives(const Claim& claim) {
  if (claim.cell) return true;
  for (const WeakStorage& weak : claim.storages)
    if (!weak.expired() && address_of(weak._unsafe_get_target()) - claim.at < claim.nbytes) return true;
  return false;
}

Claims::iterator end_claim(Claims::iterator claim) REQUIRES(graph_lock()) {
  const auto place = names->places.find(claim->second.at);
  if (place != names->places.end() && place->second == claim->first) names->places.erase(place);
  return names->claims.erase(claim);
}

bool is_claimed(uint64_t begin, uint64_t nbytes) REQUIRES(graph_lock()) {
  auto claim = names->claims.lower_bound(begin + nbytes);
  while (claim != names->claims.begin()) {
    --claim;
    if (claim->first + claim->second.nbytes <= begin) return false;
    if (lives(claim->second)) return true;
    claim = end_claim(claim);
  }
  return false;
}

uint64_t free_name(uint64_t address, uint64_t nbytes) REQUIRES(graph_lock()) {
  return is_claimed(address, nbytes) ? next_number(nbytes) : address;
}

void set_place(Claims::iterator claim, uint64_t at) REQUIRES(graph_lock()) {
  claim->second.at = at;
  names->places[at] = claim->first;
}

// Returns the claim whose memory lies around this address and does not move. Living memory does not overlap, so the
// first entry that is not out of date decides.
Claims::iterator claim_around(uint64_t address) REQUIRES(graph_lock()) {
  for (auto place = names->places.upper_bound(address); place != names->places.begin();) {
    --place;
    const auto claim = names->claims.find(place->second);
    if (lives(claim->second)) return address - place->first < claim->second.nbytes ? claim : names->claims.end();
    ++place;  // end_claim erases the entry before this iterator
    end_claim(claim);
  }
  return names->claims.end();
}

void claim_for(Cell* c, uint64_t name) REQUIRES(graph_lock()) {
  c->name = name;
  Claim& claim = names->claims[name];
  claim.nbytes = c->nbytes;
  claim.cell = c;
}

}  // namespace

uint64_t name_of(c10::StorageImpl* s) {
  const Hold lock(graph_lock());
  Cell* c = cell_of(s);
  if (c && c->name) return c->name;
  const uint64_t address = address_of(s), nbytes = s->nbytes();
  if (c) {
    const uint64_t name = free_name(address, c->nbytes);
    if (name != address) claim_for(c, name);
    return name;
  }
  // A lazy copy gets memory of its own when its address is taken.
  if (names->claims.empty() || !address || !nbytes || c10::impl::cow::is_cow_data_ptr(pointer_of(s))) return 0;
  if (const auto claim = claim_around(address); claim != names->claims.end()) {
    Claim& there = claim->second;
    const auto same = [s](const WeakStorage& weak) { return weak._unsafe_get_target() == s; };
    if (!there.cell && std::none_of(there.storages.begin(), there.storages.end(), same))
      there.storages.push_back(WeakStorage::reclaim_copy(s));
    return claim->first + (address - there.at);
  }
  const uint64_t name = free_name(address, nbytes);
  if (name == address) return 0;
  const auto claim = names->claims.emplace(name, Claim()).first;
  claim->second.nbytes = nbytes;
  claim->second.storages.push_back(WeakStorage::reclaim_copy(s));
  set_place(claim, address);
  return name;
}

bool names_differ() {
  const Hold lock(graph_lock());
  for (auto claim = names->claims.begin(); claim != names->claims.end();)
    claim = lives(claim->second) ? std::next(claim) : end_claim(claim);
  return !names->claims.empty();
}

void claim_name_locked(Cell* c) { claim_for(c, free_name(reinterpret_cast<uintptr_t>(c->bytes.get()), c->nbytes)); }

void name_moved_locked(Cell* c, uint64_t from) { claim_for(c, free_name(from, c->nbytes)); }

void name_escaped_locked(Cell* c) {
  const uint64_t address = reinterpret_cast<uintptr_t>(c->bytes.get());
  if (!c->name) {
    if (!is_claimed(address, c->nbytes)) return;
    claim_name_locked(c);
  }
  set_place(names->claims.find(c->name), address);
}

void name_adopted_locked(Cell* c, const c10::StorageImpl* s) {
  if (names->places.empty()) return;
  const auto claim = claim_around(address_of(s));
  if (claim == names->claims.end() || claim->second.cell || claim->second.at != address_of(s)) return;
  names->places.erase(claim->second.at);
  claim->second.at = 0;
  claim->second.cell = c;
  claim->second.storages.clear();
  c->name = claim->first;
}

void name_unadopted_locked(Cell* c, c10::StorageImpl* s) {
  if (!c->name) return;
  const auto claim = names->claims.find(c->name);
  if (address_of(s) == claim->first) {  // the storage is at its first address again
    end_claim(claim);
    return;
  }
  claim->second.cell = nullptr;
  claim->second.storages.push_back(WeakStorage::reclaim_copy(s));
  set_place(claim, address_of(s));
}

void end_name_locked(Cell* c) {
  if (!c->name) return;
  end_claim(names->claims.find(c->name));
  c->name = 0;
}

}  // namespace memmgr::pager
