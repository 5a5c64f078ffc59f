#include "recipes/launch_recipe.h"

#include <algorithm>
#include <cstring>

#include "cells/adoption.h"
#include "pools/pool.h"

namespace memmgr::pager {

namespace {

// Describes the arguments of a launch. The storage of an argument that is written has one entry with its bytes; other
// views of it are aliases, since the kernel may read its own writes there.
struct LaunchDescriber {
  Session& session;
  Recipe* recipe;
  HashOf<false> hash;
  c10::SmallVector<Cell*, 8> cells;                       // of `recipe->tensors`; null for values and aliases
  c10::SmallVector<const c10::StorageImpl*, 8> storages;  // of the same tensors
  c10::SmallVector<const c10::StorageImpl*, 8> written;   // by argument: a storage that is written; null: none

  // False: the launch cannot be recorded.
  bool tensor(const KernelArgument& argument, size_t at) {
    c10::TensorImpl* t = argument.tensor;
    if (!is_plain(session, t) || t->device() != session.pool->device) return false;
    c10::StorageImpl* s = t->unsafe_storage().unsafeGetStorageImpl();
    const bool owner = argument.written && std::find(written.begin(), written.begin() + at, s) == written.begin() + at;
    const bool alias = !owner && std::find(written.begin(), written.end(), s) != written.end();
    TensorArg& a = add_tensor(recipe, t, at, 0, &hash);
    Cell* c = cell_of(s);
    if (alias) {
      a.role = ArgumentRole::kAlias;
      c = nullptr;
    } else if (a.storage_bytes == 0 || (!owner && !c && is_value(a, t))) {
      a.role = ArgumentRole::kValue;
      if (a.storage_bytes) std::memcpy(a.value, s->data(), a.storage_bytes);
    } else {
      if (!c && !owner) c = adopt(session, s);
      if (!c) return false;  // of memory that is not the pool's
      a.role = !owner ? ArgumentRole::kRead : is_blank(c) ? ArgumentRole::kFresh : ArgumentRole::kWritten;
    }
    hash.mix(static_cast<uint64_t>(a.role) + 43);
    cells.push_back(c);
    storages.push_back(s);
    return true;
  }

  void find_owners() {
    for (size_t i = 0; i < recipe->tensors.size(); ++i) {
      TensorArg& a = recipe->tensors[i];
      if (a.role != ArgumentRole::kAlias) continue;
      for (size_t k = 0; k < recipe->tensors.size(); ++k)
        if (k != i && storages[k] == storages[i] && recipe->tensors[k].role != ArgumentRole::kAlias)
          a.element = static_cast<int32_t>(k);
      hash.mix(static_cast<uint64_t>(a.element) + 47);
    }
  }
};

}  // namespace

std::unique_ptr<Recipe> describe_launch(Session& session, OpInfo* info, c10::ArrayRef<KernelArgument> args) {
  std::unique_ptr<Recipe> r(new Recipe);
  r->info = info;
  LaunchDescriber d{session, r.get(), {}, {}, {}, {}};
  for (const KernelArgument& a : args)
    d.written.push_back(a.written ? a.tensor->unsafe_storage().unsafeGetStorageImpl() : nullptr);
  const void* code = info->function.load(std::memory_order_relaxed);
  if (!code) code = info;  // within a budget an info is one Triton kernel's
  d.hash.mix(reinterpret_cast<uintptr_t>(info));
  d.hash.mix(reinterpret_cast<uintptr_t>(code));
  r->args.reserve(args.size());
  for (size_t i = 0; i < args.size(); ++i) {
    if (!args[i].tensor) {
      d.hash.mix(static_cast<uint64_t>(args[i].number) + 41);
      r->args.emplace_back(args[i].number);
    } else {
      if (!d.tensor(args[i], i)) return nullptr;
      r->args.emplace_back();
    }
  }
  d.find_owners();
  return with_inputs(session, std::move(r), d.hash, c10::KernelFunction(), code, d.cells);
}

}  // namespace memmgr::pager
