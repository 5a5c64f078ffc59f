// State of the process: made when the library is loaded and never destroyed, since threads and storages outlive the
// destructors of static objects. It is for objects of namespace scope. A static object of a function is made at its
// first call, under a lock that a fork in another thread leaves taken in the child.
#pragma once

#include <new>

namespace memmgr::pager {

template <class T>
class NoDestructor {
 public:
  NoDestructor() { new (bytes_) T; }
  NoDestructor(const NoDestructor&) = delete;
  NoDestructor& operator=(const NoDestructor&) = delete;
  T& operator*() { return *reinterpret_cast<T*>(bytes_); }
  T* operator->() { return reinterpret_cast<T*>(bytes_); }

 private:
  alignas(T) unsigned char bytes_[sizeof(T)];
};

}  // namespace memmgr::pager
