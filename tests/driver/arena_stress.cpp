// Stress driver for the sanitizers: threads that allocate, free, reclaim, trim and offload against one arena and one
// tier, with invariants checked on the way (test_sanitizers.py).
//
//   arena_stress [seconds] [folder for the tier]
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "memmgr/core.h"

namespace {

constexpr uint64_t kBudget = uint64_t{48} << 20;
constexpr int kThreads = 4;

struct Parked {
  unsigned char* p;
  size_t bytes;
  unsigned char fill;
};

// The blocks that the callback may take: a table, as the pager has one.
struct Shared {
  mm_arena* arena;
  mm_tier* tier;
  std::mutex mutex;
  std::vector<Parked> vault;
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> rounds{0}, reclaimed{0}, searched{0}, offloaded{0}, refused{0};
};

[[noreturn]] void Fail(const char* text) {
  fprintf(stderr, "stress: %s\n", text);
  abort();
}

void Expect(bool holds, const char* text) {
  if (!holds) Fail(text);
}

void Fill(const Parked& block) {
  block.p[0] = block.fill;
  block.p[block.bytes / 2] = block.fill;
  block.p[block.bytes - 1] = block.fill;
}

void ExpectFilled(const Parked& block) {
  Expect(block.p[0] == block.fill && block.p[block.bytes / 2] == block.fill && block.p[block.bytes - 1] == block.fill,
         "a block was written by another owner");
}

// By a search: the choice and the release of its blocks are one step under the table's lock.
uint64_t ReclaimChosen(Shared* shared, uint64_t need, uint64_t request) {
  std::vector<Parked> chosen;
  {
    std::lock_guard hold(shared->mutex);
    std::vector<mm_victim> victims(shared->vault.size() + 1);
    const int64_t n = mm_arena_choose(shared->arena, need, request, 2.0, victims.data(), victims.size());
    Expect(n <= static_cast<int64_t>(victims.size()), "a search found blocks that nobody parked");
    for (int64_t i = 0; i < n; ++i) {
      const auto found = std::find_if(shared->vault.begin(), shared->vault.end(),
                                      [&](const Parked& block) { return block.p == victims[i].p; });
      Expect(found != shared->vault.end() && victims[i].owner == found->p, "a search found a block of another owner");
      chosen.push_back(*found);
      shared->vault.erase(found);
      Expect(mm_arena_disown(shared->arena, victims[i].p, victims[i].owner) == 1, "a block lost its owner");
    }
  }
  uint64_t released = 0;
  for (const Parked& block : chosen) {
    ExpectFilled(block);
    released += mm_arena_block_bytes(shared->arena, block.p);
    mm_arena_free(shared->arena, block.p);
    ++shared->searched;
  }
  return released;
}

uint64_t Reclaim(void* user, uint64_t need, uint64_t request, int attempt) {
  auto* shared = static_cast<Shared*>(user);
  if (attempt == 0) {
    const uint64_t chosen = ReclaimChosen(shared, need, request);
    if (chosen > 0) return chosen;
  }
  uint64_t released = 0;
  do {
    Parked victim;
    {
      std::lock_guard hold(shared->mutex);
      if (shared->vault.empty()) return released;
      victim = shared->vault.back();
      shared->vault.pop_back();
      mm_arena_disown(shared->arena, victim.p, victim.p);
    }
    ExpectFilled(victim);
    released += mm_arena_block_bytes(shared->arena, victim.p);
    mm_arena_free(shared->arena, victim.p);
    ++shared->reclaimed;
  } while (released < need);
  return released;
}

// Writes a block to the tier, frees it, and reads it into another block.
void Offload(Shared* shared, Parked block, std::mt19937* dice) {
  const bool now = (*dice)() % 2 == 0;
  const mm_slot slot =
      now ? mm_tier_write_now(shared->tier, block.p, block.bytes) : mm_tier_write(shared->tier, block.p, block.bytes);
  Expect(slot >= 0, "no room in the tier");
  if (!now && (*dice)() % 4 == 0) {  // cancelled
    mm_tier_free(shared->tier, slot);
    ExpectFilled(block);
    mm_arena_free(shared->arena, block.p);
    return;
  }
  Expect(mm_tier_wait(shared->tier, slot) == 0, "a write failed");
  mm_arena_free(shared->arena, block.p);
  auto* back = static_cast<unsigned char*>(mm_arena_alloc(shared->arena, block.bytes));
  if (back != nullptr) {
    if ((*dice)() % 2 == 0) {
      Expect(mm_tier_read(shared->tier, slot, back) == 0 && mm_tier_wait(shared->tier, slot) == 0, "a read failed");
    } else {
      Expect(mm_tier_read_now(shared->tier, slot, back) == 0, "a read failed");
    }
    ExpectFilled({back, block.bytes, block.fill});
    mm_arena_free(shared->arena, back);
    ++shared->offloaded;
  }
  mm_tier_free(shared->tier, slot);
}

void Work(Shared* shared, int seed) {
  std::mt19937 dice(seed);
  std::uniform_real_distribution<double> exponent(4, 22);
  std::vector<Parked> mine;
  while (!shared->stop) {
    ++shared->rounds;
    const auto bytes = static_cast<size_t>(std::exp2(exponent(dice)));
    void* p = dice() % 8 == 0 ? mm_arena_try_alloc(shared->arena, bytes, bytes) : mm_arena_alloc(shared->arena, bytes);
    Expect(mm_arena_resident(shared->arena) <= kBudget, "over the budget");
    if (p == nullptr) {
      ++shared->refused;
    } else {
      mine.push_back({static_cast<unsigned char*>(p), bytes, static_cast<unsigned char>(dice())});
      Fill(mine.back());
    }
    while (!mine.empty() && (mine.size() > 20 || p == nullptr || dice() % 2 == 0)) {
      std::swap(mine[dice() % mine.size()], mine.back());
      const Parked block = mine.back();
      mine.pop_back();
      ExpectFilled(block);
      const auto choice = dice() % 64;
      if (choice < 2) {
        Offload(shared, block, &dice);
      } else if (choice < 32) {
        std::lock_guard hold(shared->mutex);
        shared->vault.push_back(block);
        const mm_price price{block.p, block.p, static_cast<double>(dice() % 100), 1.0};
        mm_arena_price(shared->arena, &price, 1);
      } else {
        mm_arena_free(shared->arena, block.p);
      }
      p = block.p;
    }
    if (dice() % 256 == 0) mm_arena_trim(shared->arena, kBudget / 8);
    if (dice() % 1024 == 0) {
      char text[200];
      if (mm_arena_check(shared->arena, text, sizeof text) != 0) Fail(text);
      mm_arena_stats arena_stats;
      mm_arena_stats_get(shared->arena, &arena_stats);
      mm_tier_stats tier_stats;
      mm_tier_stats_get(shared->tier, &tier_stats);
    }
  }
  for (const Parked& block : mine) mm_arena_free(shared->arena, block.p);
}

void ForkOften(Shared* shared) {
  while (!shared->stop) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const pid_t child = fork();
    if (child == 0) {
      const bool good = mm_arena_alloc(shared->arena, 100) == nullptr && mm_tier_wait(shared->tier, 0) < 0;
      mm_tier_close(shared->tier);
      _exit(good ? 0 : 1);
    }
    int status = 1;
    waitpid(child, &status, 0);
    Expect(status == 0, "a forked child went wrong");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? atof(argv[1]) : 5;
  const char* folder = argc > 2 ? argv[2] : ".";
  char text[200] = "";
  Shared shared;
  shared.arena = mm_arena_create(kBudget, uint64_t{1} << 30, text, sizeof text);
  shared.tier = mm_tier_open(folder, 0, 0, 2, text, sizeof text);
  if (shared.arena == nullptr || shared.tier == nullptr) Fail(text);
  mm_arena_set_reclaim(shared.arena, Reclaim, &shared);
  mm_arena_set_layout(shared.arena, MM_REMAP_LAST);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(Work, &shared, i + 1);
  threads.emplace_back(ForkOften, &shared);
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  shared.stop = true;
  for (std::thread& thread : threads) thread.join();
  for (const Parked& block : shared.vault) mm_arena_free(shared.arena, block.p);
  if (mm_arena_check(shared.arena, text, sizeof text) != 0) Fail(text);
  mm_tier_close(shared.tier);
  Expect(mm_arena_destroy(shared.arena) == 0, "blocks are left over");
  printf("stress: %llu rounds, %llu blocks reclaimed, %llu by a search, %llu offloaded and back, %llu refused\n",
         static_cast<unsigned long long>(shared.rounds), static_cast<unsigned long long>(shared.reclaimed),
         static_cast<unsigned long long>(shared.searched), static_cast<unsigned long long>(shared.offloaded),
         static_cast<unsigned long long>(shared.refused));
  return 0;
}
