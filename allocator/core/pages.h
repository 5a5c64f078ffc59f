// Pages: how an address range gets and loses its memory.
//
// Words:
//   page     the step in which memory can be given and taken back (4 KiB here; 2 MiB for CUDA's virtual memory)
//   commit   make a page usable; it counts against the budget from then on
//   hole     a page of the range that is not committed
//   chunk    so many pages, at a multiple of them from the begin of the range: moved to other addresses as a whole
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "touched.h"

namespace memmgr {

// When pages may be given back.
enum class GiveBack : uint8_t {
  kAtOnce,       // whenever it helps, under the arena's lock
  kAfterSettle,  // a stream may still be using them: settle first, which waits; never under the arena's lock
  kNever,        // they are there from the start to the end
};

// The seam for another kind of memory. `user` is handed to every call.
struct PageOps {
  size_t page_bytes;  // a power of two
  GiveBack give_back;
  void* user;
  void* (*reserve)(void* user, size_t bytes);             // addresses without memory; nullptr when there are not enough
  int (*commit)(void* user, void* at, size_t bytes);      // 0 or -errno, with nothing committed
  int (*decommit)(void* user, void* at, size_t bytes);    // 0 or -errno; the addresses stay reserved, contents are lost
  void (*release)(void* user, void* base, size_t bytes);  // undoes reserve
  // Waits until the queued work of these streams is done. 0 or -errno: the pages stay. nullptr unless kAfterSettle.
  int (*settle)(void* user, StreamMask touched, const StreamTimes& times);
  // Pages that decommit has kept for the next commit go back to the system. nullptr unless kAfterSettle.
  void (*release_kept)(void* user);
  // Until it is called with 0, whole chunks of given-back pages may be used for committed ones, with their contents:
  // that spares giving them to the system and having them cleared. Under the arena's lock. nullptr: there is no such
  // way.
  void (*moving)(void* user, size_t chunk_bytes);
  // Frames: memory that can be mapped at several addresses at a time (shared_frames.h). nullptr: there is no such way.
  // take: 0 if there is none; give: it is mapped nowhere, and may be kept as decommit's is; map and unmap: so many
  // frames, 0 or -errno, with all or nothing done.
  size_t frame_bytes;  // a power of two, no more than page_bytes
  uint64_t (*take_frame)(void* user);
  void (*give_frame)(void* user, uint64_t frame);
  int (*map_frames)(void* user, void* at, const uint64_t* frames, size_t count);
  int (*unmap_frames)(void* user, void* at, size_t count);
};

inline constexpr size_t kMostChunk = size_t{1} << 20;  // a reservation begins at a multiple of this

// The host's memory for one arena.
class HostPages {
 public:
  HostPages();
  HostPages(const HostPages&) = delete;
  HostPages& operator=(const HostPages&) = delete;

  const PageOps& ops() const { return ops_; }

 private:
  struct Piece {
    char* at;
    size_t bytes;
  };

  static void* Reserve(void* user, size_t bytes);
  static int Commit(void* user, void* at, size_t bytes);
  static int Decommit(void* user, void* at, size_t bytes);
  static void Release(void* user, void* base, size_t bytes);
  static void Moving(void* user, size_t chunk_bytes);
  int CommitFresh(char* at, char* end) const;
  size_t MoveTo(char* to, size_t bytes);
  bool Move(char* from, char* to, size_t bytes);
  std::pair<char*, char*> Uncut(char* at, char* end) const;
  void GiveUp(char* at, char* end);
  bool Renew(char* low, char* high);
  bool Cut(char* low, char* high);
  void Join(char* low, char* high);
  // To the beginning of a chunk.
  char* Up(char* at) const;
  char* Down(char* at) const;

  PageOps ops_;
  char* begin_ = nullptr;  // of the reservation
  char* end_ = nullptr;
  size_t chunk_bytes_ = 0;    // 0: nothing is moved now
  std::vector<Piece> loose_;  // given back since `moving` began; the memory is still there
  // Where the kernel may have one mapping end and another begin because of our moves. A move takes from one mapping
  // only, and a process may have 65,530 of them.
  std::set<char*> seams_;
};

// One bit per page: set when the page is committed. The bits lie in memory of their own that costs nothing until it is
// touched, so that a map over a huge reserve is cheap.
class PageMap {
 public:
  explicit PageMap(uint64_t pages);
  ~PageMap();
  PageMap(const PageMap&) = delete;
  PageMap& operator=(const PageMap&) = delete;

  // All ranges are [first, end).
  uint64_t CountHoles(uint64_t first, uint64_t end) const;
  void Set(uint64_t first, uint64_t end);
  void Clear(uint64_t first, uint64_t end);
  // The first page in [first, end) whose bit is `value`, or end.
  uint64_t Next(uint64_t first, uint64_t end, bool value) const;
  // One past the last page in [first, end) whose bit is `value`, or first.
  uint64_t Previous(uint64_t first, uint64_t end, bool value) const;

 private:
  void Fill(uint64_t first, uint64_t end, bool value);

  uint64_t* words_;
  uint64_t words_bytes_;
  // No page at or above was ever committed. It keeps scans from the untouched end.
  uint64_t frontier_ = 0;
};

}  // namespace memmgr
