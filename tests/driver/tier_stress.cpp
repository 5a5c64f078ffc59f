// Several threads on one host tier over the double of libcuda, for the sanitizers: Python's tests cannot see races.
// tier_stress <double> <seconds>
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "driver.h"

namespace {

[[noreturn]] void Fail(const char* what) {
  fprintf(stderr, "tier_stress: %s\n", what);
  exit(1);
}
void Expect(bool good, const char* what) {
  if (!good) Fail(what);
}

using HostFunction = void (*)(void*);
using LaunchHostFunc = CUresult (*)(CUstream, HostFunction, void* user);

struct Shared {
  const mm_driver* driver = nullptr;
  LaunchHostFunc launch = nullptr;
  mm_device* device = nullptr;
  mm_tier* tier = nullptr;
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> rounds{0};
  std::atomic<uint64_t> full{0};
  std::atomic<uint64_t> wrong{0};
  std::mutex mutex;
  std::vector<mm_slot> waited_for;  // other threads wait for these while their owner goes on
};

struct Kernel {
  Shared* shared;
  unsigned char* block;
  size_t bytes;
  unsigned char value;
};

void Fill(void* user) {
  const std::unique_ptr<Kernel> kernel(static_cast<Kernel*>(user));
  memset(kernel->block, kernel->value, kernel->bytes);
}

void Check(void* user) {
  const std::unique_ptr<Kernel> kernel(static_cast<Kernel*>(user));
  for (size_t i = 0; i < kernel->bytes; ++i) {
    if (kernel->block[i] != kernel->value) ++kernel->shared->wrong;
  }
}

void Launch(Shared* shared, mm_stream stream, HostFunction function, void* block, size_t bytes, unsigned char value) {
  auto* kernel = new Kernel{shared, static_cast<unsigned char*>(block), bytes, value};
  Expect(shared->launch(stream, function, kernel) == CUDA_SUCCESS, "a launch failed");
}

void Train(Shared* shared, int seed) {
  const memmgr::EnsureContext context(*shared->driver, 0);
  std::mt19937 dice(seed);
  mm_stream stream = nullptr;
  Expect(shared->driver->StreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS, "no stream");
  while (!shared->stop) {
    ++shared->rounds;
    const size_t bytes = 1 + dice() % 6000;  // some are larger than a piece
    const auto value = static_cast<unsigned char>(dice());
    void* block = mm_device_alloc(shared->device, bytes, stream);
    Expect(block != nullptr, "no memory");
    Launch(shared, stream, Fill, block, bytes, value);
    const mm_slot slot =
        dice() % 2 == 0 ? mm_tier_write(shared->tier, block, bytes) : mm_tier_write_now(shared->tier, block, bytes);
    if (slot < 0) {
      Expect(slot == -ENOSPC, "a write failed");
      ++shared->full;
      mm_device_free(shared->device, block);
      continue;
    }
    {
      std::lock_guard hold(shared->mutex);
      if (shared->waited_for.size() < 4) shared->waited_for.push_back(slot);
    }
    mm_device_free(shared->device, block);
    if (dice() % 8 == 0) {
      const auto* host = static_cast<const unsigned char*>(mm_tier_bytes(shared->tier, slot));
      Expect(host != nullptr && host[0] == value && host[bytes - 1] == value, "host bytes differ");
    }
    block = mm_device_alloc(shared->device, bytes, stream);
    Expect(block != nullptr, "no memory");
    if (dice() % 2 == 0) {
      Expect(mm_tier_read_now(shared->tier, slot, block) == 0, "a read failed");
    } else {
      Expect(mm_tier_read(shared->tier, slot, block) == 0, "a read failed");
      Expect(mm_tier_use(shared->tier, slot, stream) == 0, "no use");
    }
    if (dice() % 8 == 0) Expect(mm_tier_wait(shared->tier, slot) == 0, "a wait failed");
    mm_tier_free(shared->tier, slot);
    Launch(shared, stream, Check, block, bytes, value);
    mm_device_free(shared->device, block);
  }
  Expect(shared->driver->StreamSynchronize(stream) == CUDA_SUCCESS, "work failed");
}

// Looks at slots that other threads own and may have freed, as the daemon does.
void Watch(Shared* shared) {
  while (!shared->stop) {
    mm_tier_stats stats;
    mm_tier_stats_get(shared->tier, &stats);
    Expect(stats.used_bytes <= stats.capacity_bytes, "more used than there is");
    std::vector<mm_slot> slots;
    {
      std::lock_guard hold(shared->mutex);
      std::swap(slots, shared->waited_for);
    }
    for (const mm_slot slot : slots) {
      const int polled = mm_tier_poll(shared->tier, slot);
      Expect(polled == 0 || polled == 1 || polled == -EBADF, "a poll failed");
      const int waited = mm_tier_wait(shared->tier, slot);
      Expect(waited == 0 || waited == -EBADF, "another's wait failed");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) Fail("usage: tier_stress <double> <seconds>");
  char text[300] = "";
  Shared shared;
  shared.driver = mm_driver_load(argv[1], text, sizeof text);
  if (shared.driver == nullptr) Fail(text);
  shared.launch = reinterpret_cast<LaunchHostFunc>(dlsym(dlopen(argv[1], RTLD_NOW | RTLD_LOCAL), "cuLaunchHostFunc"));
  Expect(shared.launch != nullptr, "the double launches nothing");
  shared.device = mm_device_open(shared.driver, 0, 64 << 20, MM_MEMORY_MAPPED, text, sizeof text);
  if (shared.device == nullptr) Fail(text);
  mm_test_lock_pieces(4096, 4096, 1);
  shared.tier = mm_tier_open_host(shared.device, 32 << 10, text, sizeof text);
  if (shared.tier == nullptr) Fail(text);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back(Train, &shared, i + 1);
  threads.emplace_back(Watch, &shared);
  std::this_thread::sleep_for(std::chrono::duration<double>(atof(argv[2])));
  shared.stop = true;
  for (std::thread& thread : threads) thread.join();
  mm_tier_stats stats;
  mm_tier_stats_get(shared.tier, &stats);
  mm_tier_close(shared.tier);
  Expect(stats.used_bytes == 0, "slots are left over");
  Expect(stats.errors == 0, "copies failed");
  Expect(shared.wrong == 0, "bytes differ on the device");
  Expect(mm_device_close(shared.device) == 0, "blocks are left over");
  printf("tier_stress: %llu rounds, %llu without room, %llu copies out, %llu in\n",
         static_cast<unsigned long long>(shared.rounds), static_cast<unsigned long long>(shared.full),
         static_cast<unsigned long long>(stats.writes), static_cast<unsigned long long>(stats.reads));
  return 0;
}
