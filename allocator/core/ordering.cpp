#include "ordering.h"

#include "memmgr/device.h"

#ifdef MEMMGR_MUTATIONS

#include <atomic>
#include <mutex>
#include <set>
#include <string>

namespace memmgr {

namespace {

struct Names {
  std::mutex mutex;
  std::set<std::string> all;
  std::string text;                                   // all of them, one line each
  std::atomic<const std::string*> left_out{nullptr};  // one of `all`
  static Names& Get() {
    static auto* names = new Names;
    return *names;
  }
};

}  // namespace

bool RegisterOrdering(const char* name) {
  Names& names = Names::Get();
  std::lock_guard hold(names.mutex);
  if (names.all.insert(name).second) {
    names.text.clear();
    for (const std::string& known : names.all) names.text += known + "\n";
  }
  return true;
}

bool OrderingLeftOut(const char* name) {
  const std::string* left_out = Names::Get().left_out.load();
  return left_out != nullptr && *left_out == name;
}

}  // namespace memmgr

extern "C" {

int mm_test_leave_out(const char* wait) {
  memmgr::Names& names = memmgr::Names::Get();
  std::lock_guard hold(names.mutex);
  const std::string* found = nullptr;
  if (wait != nullptr && *wait != '\0') {
    const auto at = names.all.find(wait);
    if (at == names.all.end()) return -1;
    found = &*at;
  }
  names.left_out = found;
  return 0;
}

const char* mm_test_wait_names(void) {
  memmgr::Names& names = memmgr::Names::Get();
  std::lock_guard hold(names.mutex);
  return names.text.c_str();
}

}  // extern "C"

#else

extern "C" {
int mm_test_leave_out(const char*) { return -1; }
const char* mm_test_wait_names(void) { return ""; }
}  // extern "C"

#endif
