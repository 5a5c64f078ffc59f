// Threads and streams on a device's memory, for the sanitizers: allocations,
// frees in other threads, blocks that are handed to other streams, reclaim,
// trims, synchronizations, pools and forks, over the double of libcuda whose
// workers run the kernels. Each block is filled by a kernel and checked by one
// before it is freed.
//
//   device_stress <double of libcuda> [seconds]
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "driver.h"
#include "memmgr/device.h"

namespace {

constexpr uint64_t kBudget = uint64_t{24} << 20;
constexpr int kThreads = 4;

struct Held {
  void *p = nullptr;
  size_t bytes = 0;
  int value = 0;
};

struct Shared {
  const mm_driver *driver = nullptr;
  mm_device *device = nullptr;
  CUstream streams[kThreads + 1] = {};
  CUresult (*fill)(CUstream, CUdeviceptr, uint64_t, int) = nullptr;
  CUresult (*check)(CUstream, CUdeviceptr, uint64_t, int, uint64_t *) = nullptr;
  uint64_t wrong = 0;
  std::mutex mutex;
  std::vector<Held> vault;
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> rounds{0}, refused{0}, reclaimed{0};
};

[[noreturn]] void Fail(const char *text) {
  fprintf(stderr, "stress: %s\n", text);
  abort();
}

void Expect(bool holds, const char *text) {
  if (!holds)
    Fail(text);
}

CUdeviceptr Address(void *p) { return reinterpret_cast<CUdeviceptr>(p); }

void CheckAndFree(Shared *shared, const Held &block) {
  const mm_stream home = mm_device_home(shared->device, block.p);
  Expect(shared->check(home, Address(block.p), block.bytes, block.value,
                       &shared->wrong) == 0,
         "check");
  mm_device_free(shared->device, block.p);
}

uint64_t Reclaim(void *user, uint64_t need, uint64_t, int) {
  auto *shared = static_cast<Shared *>(user);
  uint64_t released = 0;
  do {
    Held victim;
    {
      std::lock_guard hold(shared->mutex);
      if (shared->vault.empty())
        return released;
      victim = shared->vault.back();
      shared->vault.pop_back();
    }
    released += victim.bytes;
    CheckAndFree(shared, victim);
    ++shared->reclaimed;
  } while (released < need);
  return released;
}

// The block is filled on its home; `other` may read it after that.
void UseElsewhere(Shared *shared, const Held &block, CUstream other,
                  CUevent event) {
  const mm_stream home = mm_device_home(shared->device, block.p);
  Expect(shared->driver->EventRecord(event, home) == 0, "record");
  Expect(shared->driver->StreamWaitEvent(other, event, 0) == 0, "wait");
  mm_device_used(shared->device, block.p, other);
  Expect(shared->check(other, Address(block.p), block.bytes, block.value,
                       &shared->wrong) == 0,
         "check");
}

void Work(Shared *shared, int index) {
  std::mt19937 dice(index + 1);
  std::vector<Held> mine;
  const memmgr::EnsureContext context(*shared->driver, 0);
  CUevent event = nullptr;
  Expect(shared->driver->EventCreate(&event, CU_EVENT_DISABLE_TIMING) == 0,
         "event");
  while (!shared->stop) {
    ++shared->rounds;
    const size_t bytes = size_t{16} << (dice() % 17);
    CUstream stream = shared->streams[dice() % 8 == 0 ? kThreads : index];
    void *p = dice() % 8 == 0
                  ? mm_device_try_alloc(shared->device, bytes, bytes, stream)
                  : mm_device_alloc(shared->device, bytes, stream);
    if (p == nullptr) {
      ++shared->refused;
    } else {
      mine.push_back({p, bytes, static_cast<int>(dice() % 256)});
      Expect(shared->fill(stream, Address(p), bytes, mine.back().value) == 0,
             "fill");
    }
    if (!mine.empty() && dice() % 4 == 0)
      UseElsewhere(shared, mine.back(), shared->streams[dice() % kThreads],
                   event);
    while (!mine.empty() &&
           (mine.size() > 12 || p == nullptr || dice() % 2 == 0)) {
      std::swap(mine[dice() % mine.size()], mine.back());
      const Held block = mine.back();
      mine.pop_back();
      p = block.p;
      if (dice() % 3 == 0) {
        std::lock_guard hold(shared->mutex);
        shared->vault.push_back(block);
      } else {
        CheckAndFree(shared, block);
      }
    }
    if (dice() % 128 == 0)
      mm_device_trim(shared->device, kBudget / 8);
    if (dice() % 256 == 0)
      Expect(mm_device_synchronize(shared->device) == 0, "synchronize");
    if (dice() % 512 == 0) {
      char text[200];
      if (mm_arena_check(mm_device_arena(shared->device), text, sizeof text) !=
          0)
        Fail(text);
      mm_device_stats stats;
      mm_device_stats_get(shared->device, &stats);
    }
    if (index == 0 && dice() % 64 == 0) {
      const uint64_t pool = dice() % 2;
      Expect(mm_device_begin_pool(shared->device, pool, 0) == 0, "begin");
      void *pooled = mm_device_alloc(shared->device, 40000, stream);
      mm_device_free(shared->device, pooled);
      Expect(mm_device_end_pool(shared->device, pool, 0) == 0, "end");
      Expect(mm_device_release_pool(shared->device, pool, 0) == 0, "release");
    }
  }
  for (const Held &block : mine)
    CheckAndFree(shared, block);
  shared->driver->EventDestroy(event);
}

void ForkOften(Shared *shared) {
  while (!shared->stop) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const pid_t child = fork();
    if (child == 0)
      _exit(mm_device_alloc(shared->device, 100, nullptr) == nullptr ? 0
                                                                        : 1);
    int status = 1;
    waitpid(child, &status, 0);
    Expect(status == 0, "a forked child went wrong");
  }
}

} // namespace

int main(int argc, char **argv) {
  if (argc < 2)
    Fail("which driver?");
  const double seconds = argc > 2 ? atof(argv[2]) : 2;
  char text[300] = "";
  Shared shared;
  shared.driver = mm_driver_load(argv[1], text, sizeof text);
  if (shared.driver == nullptr)
    Fail(text);
  void *library = dlopen(argv[1], RTLD_NOW);
  shared.fill = reinterpret_cast<decltype(shared.fill)>(
      dlsym(library, "fake_launch_fill"));
  shared.check = reinterpret_cast<decltype(shared.check)>(
      dlsym(library, "fake_launch_check"));
  reinterpret_cast<void (*)(uint64_t)>(dlsym(library, "fake_set_granularity"))(
      65536);
  shared.device = mm_device_open(shared.driver, 0, kBudget, MM_MEMORY_MAPPED,
                                 text, sizeof text);
  if (shared.device == nullptr)
    Fail(text);
  const memmgr::EnsureContext context(*shared.driver, 0);
  for (CUstream &stream : shared.streams)
    Expect(shared.driver->StreamCreate(&stream, 1) == 0, "stream");
  mm_arena_set_reclaim(mm_device_arena(shared.device), Reclaim, &shared);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back(Work, &shared, i);
  threads.emplace_back(ForkOften, &shared);
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  shared.stop = true;
  for (std::thread &thread : threads)
    thread.join();
  for (const Held &block : shared.vault)
    CheckAndFree(&shared, block);
  if (mm_arena_check(mm_device_arena(shared.device), text, sizeof text) != 0)
    Fail(text);
  mm_device_stats stats;
  mm_device_stats_get(shared.device, &stats);
  Expect(mm_device_close(shared.device) == 0, "blocks are left over");
  Expect(__atomic_load_n(&shared.wrong, __ATOMIC_SEQ_CST) == 0,
         "a block was written by another owner");
  printf("stress: %llu rounds, %llu waits, %llu reclaimed, %llu refused, %llu "
         "synchronizations, %llu unmaps\n",
         static_cast<unsigned long long>(shared.rounds),
         static_cast<unsigned long long>(stats.waits),
         static_cast<unsigned long long>(shared.reclaimed),
         static_cast<unsigned long long>(shared.refused),
         static_cast<unsigned long long>(stats.synchronizations),
         static_cast<unsigned long long>(stats.unmaps));
  return 0;
}
