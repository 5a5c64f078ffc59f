// ScratchFile: one unlinked file and how bytes get in and out of it.
//
// Words:
//   direct   past the page cache (O_DIRECT). A machine that needs a disk tier has no memory to spare, and a page cache
//            full of evicted bytes would take it; and the bandwidth that the planner sees is the disk's. Measured: 2.5
//            against 0.7 GB/s for writes. MEMMGR_TIER_DIRECT=0 goes through the page cache.
//   cached   the beginning of a direct file that goes through the page cache after all, since the user has said that
//            the machine has so much memory to spare: the kernel keeps it while that is true, and reclaims it otherwise
//   grain    4096: every offset, and every direct transfer, is a multiple of it
//   bounce   a page-aligned buffer, for memory that is not
#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace memmgr {

class BouncePool {
 public:
  static constexpr size_t kBytes = size_t{4} << 20;
  ~BouncePool();
  char* Take();  // nullptr: no memory
  void Return(char* buffer);

 private:
  std::mutex mutex_;
  std::vector<char*> idle_;  // as many as threads were ever transferring at a time
};

class ScratchFile {
 public:
  static constexpr uint64_t kGrain = 4096;

  ScratchFile() = default;
  ~ScratchFile();
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  // False with a text in *wrong.
  bool Open(const std::string& folder, bool want_direct, std::string* wrong);
  // Makes the file longer and takes the room on the disk, as far as the file system can promise it. 0 or -errno.
  int Grow(uint64_t from_bytes, uint64_t to_bytes);
  // `offset` is a multiple of the grain and the file has room for `bytes` rounded up to it. 0 or -errno.
  int Write(const char* from, uint64_t bytes, uint64_t offset);
  int Read(char* to, uint64_t bytes, uint64_t offset);
  bool direct() const { return direct_; }
  // The first so many bytes are cached. 0 or -errno. Before the first transfer.
  int Cache(uint64_t bytes);
  // In a forked child, which may have closed descriptors and opened other files: is it still this file?
  bool Inherited() const;

 private:
  // A transfer of at most two pieces of memory that lie behind each other in the file.
  struct Transfer {
    char* memory[2];
    uint64_t bytes[2];
  };
  int Run(int fd, bool write, Transfer transfer, uint64_t offset);
  int RunBounced(bool write, char* memory, uint64_t bytes, uint64_t offset);
  void ProbeDirect();

  bool Direct(uint64_t bytes, uint64_t offset) const { return direct_ && offset + bytes > cached_bytes_; }
  int FdFor(bool direct) const { return direct || cached_fd_ < 0 ? fd_ : cached_fd_; }

  int fd_ = -1;
  int cached_fd_ = -1;  // the same file, not direct
  uint64_t cached_bytes_ = 0;
  struct stat identity_{};
  bool direct_ = false;
  BouncePool bounces_;
};

}  // namespace memmgr
