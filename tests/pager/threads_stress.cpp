// Threads on the parts of the pager that need no torch, for ThreadSanitizer: admission, the slots of the kernel, the
// thread that drops references, the locks. The sources are the pager's; headers of torch, and of the pager's cells, have
// doubles in no_torch/.
//
//   threads_stress SECONDS
//
// Prints how often each part ran; a broken promise ends it with a sentence and exit code 1.

#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/deferred_drop.h"
#include "base/kernel_slots.h"
#include "cells/cell.h"
#include "concurrency/admission.h"
#include "concurrency/python_threads.h"

namespace memmgr::pager {

Session session;
Totals totals;
uint64_t now_ns() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
}

}  // namespace memmgr::pager

using namespace memmgr::pager;

namespace {

constexpr uint64_t kLimit = 1000;
std::atomic<bool> over{false};

[[noreturn]] void broken(const char* promise) {
  std::fprintf(stderr, "%s\n", promise);
  std::_Exit(1);
}

unsigned long own_number() { return static_cast<unsigned long>(syscall(SYS_gettid)); }

// Bytes of the ops that run, and their number in the upper bits. The op of another library counts no bytes here: the ops
// for which it waits may run beside it.
std::atomic<uint64_t> inside{0};
std::atomic<unsigned long> asleep{0};  // the thread of the op that waits for other ops
std::atomic<uint64_t> admitted{0}, foreign_ops{0}, alone_ops{0};

void run_ops(unsigned seed) {
  std::mt19937 random(seed);
  while (!over) {
    const uint64_t bytes = 1 + random() % 400;
    const bool alone = random() % 16 == 0;
    const Admitted op(session, bytes, alone);
    const uint64_t now = inside.fetch_add((uint64_t{1} << 48) + bytes) + (uint64_t{1} << 48) + bytes;
    if (now >> 48 > 1 && (now & 0xffffffff) > kLimit) broken("ops were admitted beyond the budget");
    if (alone) alone_ops++;
    admitted++;
    if (random() % 8 == 0) std::this_thread::yield();
    inside.fetch_sub((uint64_t{1} << 48) + bytes);
  }
}

// An op of another library has all the room, sleeps, and waits until ops of other threads have run.
void run_foreign_ops() {
  while (!over) {
    {
      const Admitted op(session, kLimit, false, true);
      const uint64_t wanted = admitted + 3;
      asleep = own_number();
      while (admitted < wanted && !over) std::this_thread::sleep_for(std::chrono::microseconds(200));
      asleep = 0;
      foreign_ops++;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

void wait_between_ops() {
  while (!over) {
    if (others_are_running(false)) wait_for_others(0.001);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

std::atomic<bool> open{true};
uint64_t guarded_by_the_slots = 0;
std::atomic<uint64_t> read_open{0}, closings{0}, counted{0};

void run_in_kernel() {
  while (!over) {
    std::thread([] {  // its slot ends with the thread
      for (int i = 0; i < 200 && !over; ++i) {
        InKernel in_kernel;
        in_kernel.count_op();
        counted++;
        if (open.load(std::memory_order_acquire) && guarded_by_the_slots != ~uint64_t{0}) read_open++;
      }
    }).join();
  }
}

void close_and_open() {
  while (!over) {
    open.store(false, std::memory_order_release);
    if (!wait_until_kernel_is_left(60)) broken("the kernel is not left");
    guarded_by_the_slots++;
    stop_dropper();  // as a budget's end does, while other threads go on
    open.store(true, std::memory_order_release);
    closings++;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

std::mutex gil;
thread_local bool tl_in_malloc = false;
uint64_t python_calls = 0;  // with the GIL
std::array<std::atomic<c10::StorageImpl*>, 8> shown{};
std::atomic<uint64_t> held{0}, ended{0};

// Makes storages that Python and the program hold, and ends them.
void own_storages(size_t slot) {
  c10::StorageImpl storage;
  uint64_t number = 0;
  while (!over) {
    storage.bytes = ++number;
    storage.set_counts(c10::detail::kHasPyObject | 2);
    shown[slot] = &storage;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    drop(StoragePtr::reclaim(&storage));  // the program's
    while (c10::detail::refcount(storage.counts()) > 1) drop_what_waits();
    if (hold_storage({&storage})) broken("a storage that only Python has was taken without the GIL");
    if (storage.bytes != number) broken("a storage was written by another thread");
    ended++;
  }
  shown[slot] = nullptr;
}

// malloc looks at storages of other threads, and may neither wait for the GIL nor keep a storage alive by itself.
void hold_in_malloc(unsigned seed) {
  std::mt19937 random(seed);
  tl_in_malloc = true;
  while (!over) {
    c10::StorageImpl* target = shown[random() % shown.size()];
    if (!target) continue;
    StoragePtr storage = hold_storage({target});
    if (!storage) continue;
    if (storage.get()->bytes == 0) broken("a storage has ended under its reference");
    held++;
    drop_later(std::move(storage));
  }
}

}  // namespace

namespace memmgr::pager {

bool rests(Sleeper* thread, uint64_t, uint64_t) { return thread->system_thread == asleep; }

void only_python_is_left(c10::StorageImpl*) {
  if (tl_in_malloc) broken("a thread in malloc waits for the GIL");
  const std::lock_guard<std::mutex> lock(gil);
  python_calls++;
}

}  // namespace memmgr::pager

extern "C" uint64_t mm_arena_budget(mm_arena*) { return kLimit; }
extern "C" uint64_t mm_arena_resident(mm_arena*) { return 0; }

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 1;
  checks_lock_ranks = true;
  prepare_for_waiting();
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < 4; ++i) threads.emplace_back(run_ops, i);
  threads.emplace_back(run_foreign_ops);
  threads.emplace_back(wait_between_ops);
  for (int i = 0; i < 2; ++i) threads.emplace_back(run_in_kernel);
  threads.emplace_back(close_and_open);
  for (size_t i = 0; i < shown.size(); ++i) threads.emplace_back(own_storages, i);
  for (unsigned i = 0; i < 2; ++i) threads.emplace_back(hold_in_malloc, i);
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  over = true;
  for (std::thread& thread : threads) thread.join();
  drop_what_waits();
  stop_dropper();
  if (ops_counted() != counted) broken("ops are not counted");
  std::printf("%llu admitted, %llu alone, %llu foreign, %llu closings, %llu read, %llu held, %llu ended, %llu by Python\n",
              static_cast<unsigned long long>(admitted), static_cast<unsigned long long>(alone_ops),
              static_cast<unsigned long long>(foreign_ops), static_cast<unsigned long long>(closings),
              static_cast<unsigned long long>(read_open), static_cast<unsigned long long>(held),
              static_cast<unsigned long long>(ended), static_cast<unsigned long long>(python_calls));
  return 0;
}
