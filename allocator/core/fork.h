// What has to happen to the core's objects in a forked child. Only the forking thread exists there, so that any lock
// may be held by nobody, any count half written; a child therefore stops using what it inherited.
#pragma once

namespace memmgr {

class ForkAware {
 public:
  // Runs in the child, before fork() returns there. Must not allocate or lock.
  virtual void AfterForkInChild() = 0;

 protected:
  ForkAware() = default;
  ~ForkAware() = default;
  // Not in the constructor and destructor: a fork in between would find half an object.
  void WatchForks();
  void IgnoreForks();
  ForkAware(const ForkAware&) = delete;
  ForkAware& operator=(const ForkAware&) = delete;

 private:
  friend struct ForkRegistry;
  ForkAware* previous_ = nullptr;
  ForkAware* next_ = nullptr;
};

}  // namespace memmgr
