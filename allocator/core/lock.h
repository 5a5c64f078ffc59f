// Lock: a mutex that spins a little before it sleeps. The arena holds it for some tens of nanoseconds, so that a second
// thread nearly always gets it while spinning, where a sleep and a wake-up would cost microseconds.
#pragma once

#include <pthread.h>

namespace memmgr {

class Lock {
 public:
  Lock() { pthread_mutex_init(&mutex_, nullptr); }
  ~Lock() { pthread_mutex_destroy(&mutex_); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  void lock() {
    if (pthread_mutex_trylock(&mutex_) == 0) return;
    for (int i = 0; i < kSpins; ++i) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      if (i % 8 == 7 && pthread_mutex_trylock(&mutex_) == 0) return;
    }
    pthread_mutex_lock(&mutex_);
  }
  void unlock() { pthread_mutex_unlock(&mutex_); }

  // In a forked child, where the holder may be a thread that does not exist there.
  void Renew() { pthread_mutex_init(&mutex_, nullptr); }

  pthread_mutex_t* native() { return &mutex_; }

 private:
  static constexpr int kSpins = 2000;
  pthread_mutex_t mutex_;
};

}  // namespace memmgr
