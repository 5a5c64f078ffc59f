#include "base/thread_state.h"

#include <pthread.h>

#include <cstring>

namespace memmgr::pager {

thread_local int tl_depth = 0;
thread_local int tl_regions = 0;
thread_local bool tl_making_states = false;
thread_local uint64_t tl_compiled_forward = 0;
thread_local uint64_t tl_compiled_graph = 0;
thread_local int tl_readers = 0;
thread_local int tl_running_recipes = 0;
thread_local ForeignScope* tl_foreign = nullptr;

bool is_backends_thread() {
  static thread_local const bool is = [] {
    char name[16] = {};
    return pthread_getname_np(pthread_self(), name, sizeof name) == 0 &&
           (!strncmp(name, "pt_gloo", 7) || !strncmp(name, "pt_nccl", 7) || !strncmp(name, "pt_ucc", 6) ||
            !strncmp(name, "pt_mpi", 6));
  }();
  return is;
}

}  // namespace memmgr::pager
