// What has to happen to the core's objects around a fork. Only the forking thread exists in a child, so that any lock
// may be held by nobody, any count half written: an object either comes to rest before the fork, or the child stops
// using it.
#pragma once

namespace memmgr {

class ForkAware {
 public:
  // In the forking thread. What is locked here is unlocked by the other two.
  virtual void BeforeFork() {}
  virtual void AfterForkInParent() {}
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
