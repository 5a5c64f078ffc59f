#include "fork.h"

#include <pthread.h>

#include <mutex>

#include "lock.h"

namespace memmgr {

struct ForkRegistry {
  Lock lock;
  ForkAware* head = nullptr;

  // Never destroyed: a fork may happen while the process ends.
  static ForkRegistry& Get() {
    static ForkRegistry* registry = [] {
      auto* made = new ForkRegistry;
      pthread_atfork([] { Get().Before(); }, [] { Get().InParent(); }, [] { Get().InChild(); });
      return made;
    }();
    return *registry;
  }

  void Before() {
    lock.lock();
    for (ForkAware* at = head; at != nullptr; at = at->next_) at->BeforeFork();
  }

  void InParent() {
    for (ForkAware* at = head; at != nullptr; at = at->next_) at->AfterForkInParent();
    lock.unlock();
  }

  void InChild() {
    lock.Renew();
    for (ForkAware* at = head; at != nullptr; at = at->next_) at->AfterForkInChild();
  }

  void Add(ForkAware* object) {
    std::lock_guard hold(lock);
    object->next_ = head;
    if (head != nullptr) head->previous_ = object;
    head = object;
  }

  void Remove(ForkAware* object) {
    std::lock_guard hold(lock);
    (object->previous_ != nullptr ? object->previous_->next_ : head) = object->next_;
    if (object->next_ != nullptr) object->next_->previous_ = object->previous_;
  }
};

void ForkAware::WatchForks() { ForkRegistry::Get().Add(this); }
void ForkAware::IgnoreForks() { ForkRegistry::Get().Remove(this); }

}  // namespace memmgr
