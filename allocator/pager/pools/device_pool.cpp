#include "pools/device_pool.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <errno.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "base/forked_child.h"
#include "base/no_destructor.h"
#include "base/wait.h"
#include "pools/scratch.h"
#include "pools/small_blocks.h"
#include "pools/stream_rules.h"

namespace memmgr::pager {

namespace {

const mm_plugin* plugin = nullptr;

void free_on_device(void* block);

class DevicePool final : public Pool {
 public:
  DevicePool(Session& session, c10::Device where, mm_device* memory)
      : Pool(session, where, mm_device_arena(memory)), memory_(memory) {}

  bool is_cuda() const { return device.type() == c10::kCUDA; }
  // The blocks are those of torch's own allocator; the arena only counts.
  bool is_torchs() const { return is_cuda() && torchs_; }
  bool has_addresses() const override { return !is_torchs(); }
  bool owns(const void* p) const override { return is_torchs() || Pool::owns(p); }
  mm_device* queue() const override { return memory_; }
  mm_stream stream() const override {
    const auto* guard = c10::impl::getDeviceGuardImpl(device.type());
    return guard->getStreamNativeHandle(guard->getStream(device));
  }

  mm_stream opened_on() const override { return main_; }
  mm_stream home(const void* block) const override { return mm_device_home(memory_, block); }

  c10::DeleterFnPtr deleter() const override { return is_cuda() ? plugin->release : &free_on_device; }
  c10::DeleterFnPtr earlier() const override { return is_cuda() ? plugin->earlier() : nullptr; }
  c10::Allocator* allocator() const override { return c10::GetAllocator(device.type()); }

  // Allocates on this device, whichever is current, with or without an open budget.
  at::DataPtr allocate(uint64_t nbytes) override {
    if (is_cuda()) {
      const c10::DeviceGuard here(device);
      return allocator()->allocate(nbytes);
    }
    TORCH_CHECK(!forked_child, "memmgr: a forked child cannot use what its parent had on ", device.str());
    void* block = take(nbytes, stream());
    if (!block) room_maker.fail(*this, nbytes);
    return {block, block, &free_on_device, device};
  }
  at::DataPtr try_allocate(uint64_t nbytes, uint64_t keep_free) override {
    void* block = is_cuda() ? plugin->try_allocate(device.index(), nbytes, keep_free, main_)
                            : mm_device_try_alloc(memory_, nbytes, keep_free, main_);
    return block ? at::DataPtr(block, block, deleter(), device) : at::DataPtr();
  }
  void* take(uint64_t nbytes, mm_stream on) {
    Taking& here = taking();
    const bool large = nbytes >= session.options.small_bytes;
    mm_points* const points = large ? here.points : nullptr;
    std::optional<Wait> searching;  // no time of the op, and its points are none either
    if (large) searching.emplace();
    const int begun = C10_UNLIKELY(points != nullptr) ? mm_points_add(points, on) : -1;
    void* block = mm_device_alloc(memory_, nbytes, on);
    if (C10_UNLIKELY(points != nullptr)) here.searches.emplace_back(begun, mm_points_add(points, on));
    if (large) searching->end();
    if (!block) return nullptr;
    note_scratch_taken(nbytes);
    note_small_request(arena, nbytes);
    if (C10_UNLIKELY(here.fill >= 0)) fill(block, here.fill, nbytes, on);
    return block;
  }
  void give(void* block) {
    note_scratch_given(mm_arena_block_bytes(arena, block));
    if (C10_UNLIKELY(c10::memoryProfilingEnabled())) tell_profiler(block, false);
    mm_device_free(memory_, block);
  }
  void tell_profiler(void* block, bool allocated) const {
    const auto bytes = static_cast<int64_t>(mm_arena_block_bytes(arena, block));
    const auto live = static_cast<size_t>(mm_arena_resident(arena));
    c10::reportMemoryUsageToProfiler(block, allocated ? bytes : -bytes, live, live, device);
  }

  void copy(void* to, const void* from, uint64_t nbytes) override {
    check(mm_device_copy(memory_, to, from, nbytes, stream()), "copied");
  }
  void compare(const void* first, const void* second, uint64_t nbytes, int fill, Compared* found) override {
    if (has_kernels()) {
      unsigned bits = 0;
      check(mm_device_compare(memory_, first, second, nbytes, fill, stream(), &bits), "compared");
      found->equal &= !(bits & MM_DIFFERS);
      found->gaps |= (bits & MM_GAPS) != 0;
      found->other |= (bits & MM_OTHER) || ((bits & MM_DIFFERS) && !(bits & MM_WRITTEN));
      return;
    }
    std::array<std::unique_ptr<char[]>, 2> piece;
    for (auto& p : piece) p.reset(new char[std::min(nbytes, kPiece)]);
    for (uint64_t at = 0; at < nbytes && !found->other; at += kPiece) {
      const uint64_t n = std::min(kPiece, nbytes - at);
      fetch(piece[0].get(), static_cast<const char*>(first) + at, n);
      fetch(piece[1].get(), static_cast<const char*>(second) + at, n);
      pager::compare(piece[0].get(), piece[1].get(), n, fill, found);
    }
  }
  bool fills() const override { return has_kernels() && !is_torchs(); }
  uint64_t sum(const void* p, uint64_t nbytes) override {
    wait_for_writers(p);
    if (has_kernels()) {
      uint64_t found = 0;
      check(mm_device_sum(memory_, p, nbytes, stream(), &found), "summed");
      return found;
    }
    std::unique_ptr<char[]> bytes(new char[nbytes]);  // not filled with zeros first
    fetch(bytes.get(), p, nbytes);
    return checksum(bytes.get(), nbytes);
  }
  Checksum begin_sum(const void* p, uint64_t nbytes) override {
    if (!has_kernels()) return Checksum(sum(p, nbytes));
    wait_for_writers(p);
    mm_sum* pending = nullptr;
    const int error = mm_device_sum_begin(memory_, p, nbytes, stream(), &pending);
    if (error == -EBUSY) return {};
    check(error, "summed");
    return {memory_, pending};
  }
  // Without kernels the bytes are fetched through pageable memory.
  bool sums_cheaply(uint64_t nbytes) const override { return has_kernels() || nbytes <= kPiece; }
  bool sums_later() const override { return has_kernels(); }
  void scribble(void* p, uint64_t nbytes) override {
    if (!rule_holds(kScribbled)) return;
    check(mm_device_wait_block(memory_, stream(), p), "waited for");  // a copy of it may be queued
    mm_device_used(memory_, p, stream());                             // whose home may be another stream
    if (mm_device_fill(memory_, p, 0xCD, nbytes, stream()) == 0) return;
    for (uint64_t at = 0; at < nbytes; at += scribble_.size())
      copy(static_cast<char*>(p) + at, scribble_.data(), std::min<uint64_t>(scribble_.size(), nbytes - at));
  }
  void trim() override {
    if (is_cuda()) plugin->trim(device.index());
  }
  void settle() override { check(mm_device_synchronize(memory_), "waited for"); }
  void settle_stream() override { check(mm_device_synchronize_stream(memory_, stream()), "waited for"); }

  mm_tier* open_host_tier(uint64_t capacity, const char* folder, uint64_t file_bytes, uint64_t throttle, char* why,
                          size_t length) override {
    if (!folder) return mm_tier_open_host(memory_, capacity, why, length);
    return mm_tier_open_ladder(memory_, capacity, folder, file_bytes, throttle, 2, why, length);
  }
  void set_budget(uint64_t bytes) override {
    if (is_cuda())
      plugin->set_budget(device.index(), bytes);
    else
      mm_arena_set_budget(arena, bytes);
  }
  void install() override;
  void uninstall() override;
  void forget_in_child() override;
  std::string broken() const override {
    char why[400] = "";
    return mm_device_broken(memory_, why, sizeof why) == 0 ? std::string() : why;
  }
  const char* out_of_memory_words() const override {
    return is_cuda() ? "CUDA out of memory. Tried to allocate " : "Device out of memory. Tried to allocate ";
  }

 private:
  static constexpr uint64_t kPiece = 4 << 20;

  bool has_kernels() const { return mm_device_has_kernels(memory_) != 0; }
  // Not while a graph is captured: its tensors stay, so nobody compares their gaps with those of another run.
  void fill(void* block, int byte, uint64_t nbytes, mm_stream on) {
    const int error = mm_device_fill(memory_, block, byte, nbytes, on);
    if (C10_LIKELY(error == 0) || error == -EBUSY) return;
    give(block);
    check(error, "filled");
  }
  void wait_for_writers(const void* p) const {
    if (rule_holds(kRuleChecked)) check(mm_device_wait_block(memory_, stream(), p), "waited for");
  }
  void fetch(void* to, const void* from, uint64_t nbytes) const {
    check(mm_device_fetch(memory_, to, from, nbytes, stream()), "read");
  }
  void check(int error, const char* what) const {
    if (C10_LIKELY(error == 0)) return;
    throw_if_broken();
    TORCH_CHECK(error != -EBUSY, "memmgr: bytes on ", device.str(), " cannot be ", what,
                " while a graph is captured there: budgets open and close outside of captures");
    TORCH_CHECK(false, "memmgr: bytes on ", device.str(), " cannot be ", what, ": error ", error);
  }

  const std::vector<char> scribble_ = std::vector<char>(1 << 16, '\xCD');  // as long as copies of it may be queued
  mm_device* const memory_;
  const bool torchs_ = plugin && plugin->is_torchs;
  mm_stream main_ = nullptr;  // the stream on which the budget was opened: blocks for prefetches are allocated on it
};

std::array<DevicePool*, 64> pools{};  // for the life of the process: tensors may outlive budgets

void free_on_device(void* block) {
  if (!block || forked_child) return;
  for (DevicePool* pool : pools)
    if (pool && mm_arena_owns(pool->arena, block)) return pool->give(block);
}

// ---- for devices whose allocator is looked up at every use ----

struct DeviceAllocator final : c10::Allocator {
  c10::Allocator* previous = nullptr;
  std::atomic<DevicePool*> open{nullptr};

  at::DataPtr allocate(size_t n) override {
    DevicePool* pool = open.load(std::memory_order_relaxed);
    // Storages keep this allocator, and may grow when no budget is open, or one on another device.
    if (!pool || forked_child || c10::impl::getDeviceGuardImpl(pool->device.type())->getDevice() != pool->device)
      return previous->allocate(n);
    if (n == 0) return {nullptr, nullptr, &free_on_device, pool->device};
    at::DataPtr taken = pool->allocate(n);
    if (C10_UNLIKELY(c10::memoryProfilingEnabled())) pool->tell_profiler(taken.get(), true);
    return taken;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_on_device; }
  void copy_data(void* to, const void* from, std::size_t n) const override { previous->copy_data(to, from, n); }
};

// never destroyed: storages keep it
NoDestructor<DeviceAllocator> the_allocator_of_devices;

// ---- CUDA's ----

std::atomic<DevicePool*> cuda_open{nullptr};  // or the last one: another thread may be about to call it

void* take_for_cuda(size_t nbytes, mm_stream stream) { return cuda_open.load()->take(nbytes, stream); }

const mm_plugin_hooks* hooks_of(int ordinal) {
  static mm_plugin_hooks hooks[64];  // one for each device: another thread may still read the last budget's
  hooks[ordinal] = {ordinal,
                    &take_for_cuda,
                    [](uint64_t n) { return room_maker.reclaim(static_cast<Pool*>(cuda_open.load()), n, n, 0); },
                    &note_scratch_taken,
                    [](size_t n) { room_maker.fail(*cuda_open.load(), n); },
                    &note_scratch_given};
  return &hooks[ordinal];
}

}  // namespace

void DevicePool::install() {
  main_ = stream();
  queues = true;
  if (is_cuda()) {
    cuda_open = this;
    plugin->set_hooks(hooks_of(device.index()));
    return;
  }
  DeviceAllocator& a = *the_allocator_of_devices;
  c10::Allocator* now = c10::GetAllocator(device.type());
  if (now != &a) a.previous = now;
  a.open = this;
  c10::SetAllocator(device.type(), &a, 255);
}

void DevicePool::uninstall() {
  queues = false;
  if (is_cuda()) {
    plugin->set_hooks(nullptr);
  } else {
    the_allocator_of_devices->open = nullptr;
    c10::SetAllocator(device.type(), the_allocator_of_devices->previous, 255);
  }
  if (!rule_holds(kRuleClosed)) return;
  if (is_torchs())
    settle();
  else if (is_cuda())
    // Torch goes on with this allocator, and the pages are its cache until torch.cuda.empty_cache. The wait is refused
    // during a capture, which an earlier step of closing has reported.
    mm_device_synchronize(memory_);
  else
    mm_device_trim(memory_, 0);  // waits for the device, too
}

void DevicePool::forget_in_child() {
  queues = false;
  if (is_cuda()) return;  // the plugin has a fork handler of its own
  DeviceAllocator& a = *the_allocator_of_devices;
  a.open = nullptr;
  if (a.previous) c10::SetAllocator(device.type(), a.previous, 255);
}

Pool* device_pool(Session& session, c10::Device where, const char* driver_path) {
  const auto ordinal = static_cast<size_t>(where.index());
  TORCH_CHECK(where.index() >= 0 && ordinal < pools.size(), "memmgr: no device ", where.str());
  if (pools[ordinal]) return pools[ordinal];
  char why[256] = "";
  mm_device* memory = nullptr;
  if (where.type() == c10::kCUDA) {
    TORCH_CHECK(plugin, "memmgr: torch has its own CUDA allocator");
    memory = plugin->device(where.index(), why, sizeof why);
  } else if (const mm_driver* driver = mm_driver_load(driver_path, why, sizeof why)) {
    memory = mm_device_open(driver, where.index(), MM_UNLIMITED, MM_MEMORY_MAPPED, why, sizeof why);
  }
  TORCH_CHECK(memory, "memmgr: no device memory: ", why);
  pools[ordinal] = new DevicePool(session, where, memory);
  mm_arena_set_reclaim(mm_device_arena(memory), room_maker.reclaim, static_cast<Pool*>(pools[ordinal]));
  return pools[ordinal];
}

void use_plugin(const mm_plugin* table) {
  TORCH_CHECK(!table || table->version == MM_PLUGIN_VERSION,
              "memmgr: the CUDA allocator is of another version than the pager");
  plugin = table;
}

}  // namespace memmgr::pager
