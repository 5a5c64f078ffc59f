// Actions of the core's objects around a fork. Only the forking thread exists in a child, so a lock may have no owner
// there and a count may be half written: an object either comes to rest before the fork, or the child stops using it.
#pragma once

namespace memmgr {

class ForkAware {
 public:
  // In the forking thread. Locks taken here are released by the other two.
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
