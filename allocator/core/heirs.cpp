#include "heirs.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

namespace memmgr {

Heirs::~Heirs() {
  for (const Heir& heir : living_)
    if (heir.pipe >= 0) close(heir.pipe);
  if (revoked_ != nullptr) munmap(revoked_, sizeof *revoked_);
}

void Heirs::BeforeFork(bool inherits) {
  pipe_[0] = pipe_[1] = -1;
  if (!inherits) return;
  ++forks_;
  if (revoked_ == nullptr) {
    void* page = mmap(nullptr, sizeof *revoked_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (page != MAP_FAILED) revoked_ = new (page) std::atomic<uint64_t>(0);
  }
  // A child that cannot be watched counts as living for ever.
  if (pipe2(pipe_, O_CLOEXEC) != 0 || fstat(pipe_[1], &told_) != 0) pipe_[0] = pipe_[1] = -1;
  living_.push_back({forks_, pipe_[0]});
}

void Heirs::AfterForkInParent() {
  if (pipe_[1] >= 0) close(pipe_[1]);
}

void Heirs::AfterForkInChild() {
  // One's own among them: a pipe of which a child held both ends would never end for its own children.
  for (const Heir& heir : living_)
    if (heir.pipe >= 0) close(heir.pipe);
  living_.clear();
}

bool Heirs::Any(uint64_t since, uint64_t until) {
  std::erase_if(living_, [](const Heir& heir) {
    pollfd end{heir.pipe, 0, 0};
    if (heir.pipe < 0 || poll(&end, 1, 0) != 1) return false;
    close(heir.pipe);
    return true;
  });
  return std::any_of(living_.begin(), living_.end(),
                     [&](const Heir& heir) { return heir.fork > since && heir.fork <= until; });
}

bool Heirs::Revoke() {
  if (revoked_ == nullptr) return false;
  revoked_->store(forks_);  // before anything is written where they read
  for (const Heir& heir : living_)
    if (heir.pipe >= 0) close(heir.pipe);
  living_.clear();
  return true;
}

bool Heirs::MayRead() const {
  struct stat now{};
  const bool told = pipe_[1] >= 0 && fstat(pipe_[1], &now) == 0 && now.st_ino == told_.st_ino;
  return told && revoked_ != nullptr && revoked_->load() < forks_;
}

}  // namespace memmgr
