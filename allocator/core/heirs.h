// Heirs: the forked children that may still read bytes that a scratch file held when they were forked. A fork does not
// copy a file: where room was given back and written anew, a child would find other bytes than before.
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <cstdint>
#include <vector>

namespace memmgr {

// Nothing here locks: the owner does.
class Heirs {
 public:
  Heirs() = default;
  ~Heirs();
  Heirs(const Heirs&) = delete;
  Heirs& operator=(const Heirs&) = delete;

  // Around a fork, in this order. `inherits`: there is something that the child may read.
  void BeforeFork(bool inherits);
  void AfterForkInParent();
  void AfterForkInChild();

  uint64_t forks() const { return forks_; }  // so far; the n-th child is of fork n
  // Does a child live of a fork after `since`, up to `until`?
  bool Any(uint64_t since, uint64_t until);
  // Forbids living children to read. False: they cannot be notified.
  bool Revoke();

  // In a child, after it has read: returns true if the bytes are those of its fork.
  bool MayRead() const;

 private:
  struct Heir {
    uint64_t fork;
    int pipe;  // its other end is the child's alone (and its children's): it ends with them. -1: never known to end
  };

  std::vector<Heir> living_;
  std::atomic<uint64_t>* revoked_ = nullptr;  // in shared memory: children up to this fork
  uint64_t forks_ = 0;
  int pipe_[2] = {-1, -1};  // while a fork is under way; in a child the end that reports it
  struct stat told_{};  // the identity of pipe_[1]: a child may close unknown descriptors, and open another file there
};

}  // namespace memmgr
