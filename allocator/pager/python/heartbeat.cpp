#include "python/heartbeat.h"

#include <pybind11/pybind11.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if __has_include(<torch/csrc/distributed/c10d/Store.hpp>)
#include <torch/csrc/distributed/c10d/Store.hpp>
#define MEMMGR_HAS_STORES
#endif

#include "base/gil.h"
#include "base/no_destructor.h"
#include "residency/floor.h"

namespace memmgr::pager {

#ifdef MEMMGR_HAS_STORES
namespace {

struct Beat {
  std::mutex lock;
  std::condition_variable changed;
  bool ends = false, done = false;
  std::atomic<uint64_t> answered{0};
};

// the GIL is held
NoDestructor<std::shared_ptr<Beat>> current_beat;

void run_beat(const std::shared_ptr<Beat>& beat, c10::intrusive_ptr<c10d::Store> store, const std::string& key,
              std::chrono::duration<double> every) {
  std::unique_lock<std::mutex> lock(beat->lock);
  for (uint64_t n = 1; !beat->ends; ++n) {
    lock.unlock();
    const std::string said = std::to_string(n) + ' ' + std::to_string(floor_bytes());
    try {
      store->set(key, std::vector<uint8_t>(said.begin(), said.end()));
      beat->answered++;
    } catch (const std::exception&) {  // the store may have ended; its readers notice that
    }
    lock.lock();
    beat->changed.wait_for(lock, every, [&] { return beat->ends; });
  }
  store.reset();
  beat->done = true;
  beat->changed.notify_all();
}

}  // namespace

bool begin_beat(PyObject* object, const std::string& key, double seconds) {
  end_beat();
  const auto* instance = reinterpret_cast<pybind11::detail::instance*>(object);
  if (!instance->simple_layout) return false;
  auto* store = static_cast<c10d::Store*>(instance->simple_value_holder[0]);
  auto beat = std::make_shared<Beat>();
  std::thread(run_beat, beat, c10::intrusive_ptr<c10d::Store>::reclaim_copy(store), key,
              std::chrono::duration<double>(seconds))
      .detach();
  *current_beat = std::move(beat);
  return true;
}

// A store whose host has vanished never answers, so the wait is bounded.
void end_beat() {
  const auto beat = std::move(*current_beat);
  *current_beat = nullptr;
  if (!beat) return;
  const WithoutGil released;
  std::unique_lock<std::mutex> lock(beat->lock);
  beat->ends = true;
  beat->changed.notify_all();
  beat->changed.wait_for(lock, std::chrono::milliseconds(200), [&] { return beat->done; });
}

uint64_t beats_answered() { return *current_beat ? (*current_beat)->answered.load() : 0; }
#else
bool begin_beat(PyObject*, const std::string&, double) { return false; }
void end_beat() {}
uint64_t beats_answered() { return 0; }
#endif

}  // namespace memmgr::pager
