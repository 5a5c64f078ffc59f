// Cost of an allocation: the arena and the system's allocator, side by side, on a sequence like training's.
//
//   cmake -S allocator -B build -DMEMMGR_BENCH=ON && cmake --build build && build/arena_speed
//
// A pass allocates activations of some layers, with temporaries in between that are freed at once, and frees the
// activations in reverse order. "ns" is for one malloc and its free together, memory untouched. "touched" writes to
// every page of every block, which is where reuse of pages pays.
//
// "search" is for one choice of victims, over an arena of that many blocks and runs: a third free, a tenth pinned,
// the others priced, requests from 1 to 64 blocks long; the median and the worst of many.
//
// "at its budget" is the same pass under 30 % of its bytes, where a block has to be evicted before each allocation:
// addresses are free, and memory is moved to them. Printed are the bytes that a pass moves and the cost of its mallocs
// and frees, in the first ten passes and after many: leftovers of moves must not add up.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "memmgr/core.h"

namespace {

using Seconds = std::chrono::duration<double>;

struct System {
  void* Alloc(size_t bytes) {
    void* p = nullptr;
    return posix_memalign(&p, 64, bytes) == 0 ? p : nullptr;  // the call of torch's CPU allocator
  }
  void Free(void* p) { free(p); }
};

struct Ours {
  mm_arena* arena;
  void* Alloc(size_t bytes) { return mm_arena_alloc(arena, bytes); }
  void Free(void* p) { mm_arena_free(arena, p); }
};

// Sizes of one pass over a transformer of 12 layers: per layer some large activations, some vectors, some scalars.
std::vector<size_t> Pass(unsigned seed) {
  std::mt19937 dice(seed);
  std::vector<size_t> sizes;
  for (int layer = 0; layer < 12; ++layer) {
    for (const size_t large : {3, 4, 4, 16, 16, 4, 12}) sizes.push_back(large * 196608 + dice() % 512);
    for (int i = 0; i < 6; ++i) sizes.push_back(2048 + dice() % 4096);
    for (int i = 0; i < 4; ++i) sizes.push_back(4 + dice() % 60);
  }
  return sizes;
}

template <typename Allocator>
uint64_t RunPass(Allocator* allocator, const std::vector<size_t>& sizes, bool touch, std::vector<void*>* live) {
  uint64_t pairs = 0;
  const auto use = [&](void* p, size_t bytes) {
    if (p == nullptr) abort();
    if (!touch) return;
    for (size_t at = 0; at < bytes; at += 4096) static_cast<volatile char*>(p)[at] = 1;
  };
  for (const size_t bytes : sizes) {
    void* temporary = allocator->Alloc(bytes / 2 + 1);
    use(temporary, bytes / 2 + 1);
    live->push_back(allocator->Alloc(bytes));
    use(live->back(), bytes);
    allocator->Free(temporary);
    pairs += 2;
  }
  for (; !live->empty(); live->pop_back()) allocator->Free(live->back());
  return pairs;
}

// Nanoseconds for a pair, the best of five rounds; with two threads both run all of it.
template <typename Allocator>
double Measure(Allocator allocator, int threads, bool touch) {
  double best = 1e18;
  for (int round = 0; round < 5; ++round) {
    std::vector<double> took(threads);
    std::vector<std::thread> pool;
    pthread_barrier_t ready;
    pthread_barrier_init(&ready, nullptr, threads);
    for (int i = 0; i < threads; ++i) {
      pool.emplace_back([&, i] {
        Allocator mine = allocator;
        const std::vector<size_t> sizes = Pass(i);
        std::vector<void*> live;
        live.reserve(sizes.size());
        RunPass(&mine, sizes, touch, &live);
        pthread_barrier_wait(&ready);
        const auto start = std::chrono::steady_clock::now();
        uint64_t pairs = 0;
        for (int pass = 0; pass < (touch ? 5 : 500); ++pass) pairs += RunPass(&mine, sizes, touch, &live);
        took[i] = Seconds(std::chrono::steady_clock::now() - start).count() * 1e9 / static_cast<double>(pairs);
      });
    }
    for (std::thread& thread : pool) thread.join();
    pthread_barrier_destroy(&ready);
    best = std::min(best, *std::max_element(took.begin(), took.end()));
  }
  return best;
}

struct SearchTimes {
  double median_us, worst_us;
};

// An arena of `pieces` blocks and runs in address order, and the microseconds that a choice takes there.
SearchTimes MeasureSearch(int how, int pieces, double exponent) {
  constexpr size_t kBlock = 65536;
  char text[200] = "";
  std::mt19937 dice(7);
  mm_arena* arena = mm_arena_create(static_cast<uint64_t>(pieces) * kBlock, 0, text, sizeof text);
  if (arena == nullptr) abort();
  mm_arena_set_layout(arena, MM_REMAP_NEVER, 0);
  mm_arena_set_staleness_exponent(arena, exponent);
  std::vector<void*> live(static_cast<size_t>(pieces));
  // The descriptors are not to lie in memory as the blocks do: that would be a friendlier walk than training gives.
  for (void*& p : live) p = mm_arena_alloc(arena, kBlock);
  for (int round = 0; round < 3; ++round) {
    std::vector<size_t> order(live.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), dice);
    for (size_t i = 0; i < order.size() / 3; ++i) mm_arena_free(arena, live[order[i]]);
    for (size_t i = 0; i < order.size() / 3; ++i) live[order[i]] = mm_arena_alloc(arena, kBlock);
  }
  std::sort(live.begin(), live.end());
  for (size_t i = 0; i < live.size(); ++i) {
    if (i % 3 == 1) {
      mm_arena_free(arena, live[i]);
    } else if (dice() % 10 != 0) {
      const double cost = 1e-6 * static_cast<double>(1 + dice() % 100000);
      const mm_price price{live[i], live[i], cost, 1e-3 * static_cast<double>(dice() % 10000)};
      mm_arena_price(arena, &price, 1);
    }
  }
  std::vector<double> took;
  std::vector<mm_victim> victims(live.size());
  for (int i = 0; i < 400; ++i) {
    const uint64_t request = kBlock * (1 + dice() % 64);
    const auto start = std::chrono::steady_clock::now();
    const int64_t n = mm_arena_choose(arena, how, request / 2, request, 11.0, victims.data(), victims.size());
    took.push_back(Seconds(std::chrono::steady_clock::now() - start).count() * 1e6);
    if (n > static_cast<int64_t>(victims.size())) abort();
  }
  for (size_t i = 0; i < live.size(); ++i)
    if (i % 3 != 1) mm_arena_free(arena, live[i]);
  mm_arena_destroy(arena);
  std::sort(took.begin(), took.end());
  return {took[took.size() / 2], took.back()};
}

struct RemapTimes {
  double first_ms, last_ms, moved_mb;
};

// Passes that are all the same; the medians of the first ten and of the last ten.
RemapTimes MeasureRemap(int passes) {
  std::vector<size_t> sizes;
  uint64_t bytes = 0;
  for (const size_t size : Pass(1)) {
    if (size > 8192) sizes.push_back(size);
    bytes += size;
  }
  const uint64_t budget = bytes * 3 / 10;
  mm_arena* arena = mm_arena_create(budget, 0, nullptr, 0);
  if (arena == nullptr) abort();
  std::vector<double> took;
  for (int pass = 0; pass < passes; ++pass) {
    std::mt19937 dice(2);
    std::vector<std::pair<void*, size_t>> live;
    uint64_t live_bytes = 0;
    double seconds = 0;
    const auto timed = [&seconds](auto&& body) {
      const auto start = std::chrono::steady_clock::now();
      body();
      seconds += Seconds(std::chrono::steady_clock::now() - start).count();
    };
    for (const size_t size : sizes) {
      while (live_bytes + size + 65536 > budget) {
        std::swap(live[dice() % live.size()], live.back());
        timed([&] { mm_arena_free(arena, live.back().first); });
        live_bytes -= live.back().second;
        live.pop_back();
      }
      void* p = nullptr;
      timed([&] { p = mm_arena_alloc(arena, size); });
      if (p == nullptr) abort();
      for (size_t at = 0; at < size; at += 4096) static_cast<volatile char*>(p)[at] = 1;
      live.emplace_back(p, size);
      live_bytes += size;
    }
    for (const auto& [p, size] : live) mm_arena_free(arena, p);
    took.push_back(seconds * 1e3);
  }
  mm_arena_stats stats;
  mm_arena_stats_get(arena, &stats);
  mm_arena_destroy(arena);
  const auto median = [](std::vector<double> some) {
    std::sort(some.begin(), some.end());
    return some[some.size() / 2];
  };
  return {median({took.begin(), took.begin() + 10}), median({took.end() - 10, took.end()}),
          static_cast<double>(stats.remapped_bytes) / 1e6 / passes};
}

std::string Processor() {
  std::string name = "unknown processor";
  if (FILE* file = fopen("/proc/cpuinfo", "r")) {
    char line[256];
    while (fgets(line, sizeof line, file) != nullptr) {
      if (strncmp(line, "model name", 10) != 0) continue;
      name = strchr(line, ':') + 2;
      name.pop_back();
      break;
    }
    fclose(file);
  }
  return name;
}

}  // namespace

int main() {
  char text[200] = "";
  mm_arena* arena = mm_arena_create(uint64_t{8} << 30, 0, text, sizeof text);
  if (arena == nullptr) {
    fprintf(stderr, "%s\n", text);
    return 1;
  }
  printf("%s, %ld cores, gcc %s, ABI %d\n", Processor().c_str(), sysconf(_SC_NPROCESSORS_ONLN), __VERSION__,
         mm_abi_version());
  printf("%-26s %12s %12s %8s\n", "malloc + free", "arena ns", "system ns", "ratio");
  for (const bool touch : {false, true}) {
    for (const int threads : {1, 2}) {
      const double ours = Measure(Ours{arena}, threads, touch);
      const double theirs = Measure(System{}, threads, touch);
      const std::string name =
          std::to_string(threads) + (threads == 1 ? " thread" : " threads") + (touch ? ", touched" : "");
      printf("%-26s %12.1f %12.1f %8.2f\n", name.c_str(), ours, theirs, ours / theirs);
    }
  }
  mm_arena_stats stats;
  mm_arena_stats_get(arena, &stats);
  printf("committed at most %.1f MiB for %.1f MiB live at most\n",
         static_cast<double>(stats.committed_peak_bytes) / 1048576,
         static_cast<double>(stats.live_peak_bytes) / 1048576);
  printf("\n%-26s %12s %12s\n", "search, 10,000 pieces", "median us", "worst us");
  const char* const names[] = {"score", "dte", "window"};
  for (const int how : {MM_BY_WINDOW, MM_BY_SCORE, MM_BY_DTE}) {
    for (const double exponent : {1.0, 0.25}) {
      const SearchTimes times = MeasureSearch(how, 10000, exponent);
      const std::string name = std::string(names[how]) + (exponent == 1.0 ? ", age^1" : ", age^1/4");
      printf("%-26s %12.1f %12.1f\n", name.c_str(), times.median_us, times.worst_us);
    }
  }
  constexpr int kPasses = 200;
  const RemapTimes remap = MeasureRemap(kPasses);
  printf("\n%-26s %12s %12s %12s\n", "at its budget, a pass", "MB moved", "ms, 1 to 10", "ms, at last");
  printf("%-26s %12.1f %12.2f %12.2f\n", "30 % of its bytes", remap.moved_mb, remap.first_ms, remap.last_ms);
  return mm_arena_destroy(arena);
}
