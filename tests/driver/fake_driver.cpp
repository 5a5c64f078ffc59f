// A double of libcuda: the same names, over ordinary memory, so that code for a GPU runs here under tests.
//
//   memory    lies at real addresses, so that a test's kernels (host functions) can work on it. Memory that was freed
//             or unmapped cannot be touched: a kernel that does crashes, a copy ends the process with a text
//   streams   a queue of tasks each; order within a stream is kept, order between streams only by an event that is
//             waited for. Copies run in two halves, so that other work can fall between
//   prompt    everything runs at once: a device that is always idle
//   random    every call lets some tasks of random streams run (in the calling thread), at speeds that change
//   late      a task runs only when a thread waits for later work (or queries it again and again)
//   threaded  workers run the tasks, with pauses: work really goes on beside the program
//   timed     there is virtual time (virtual_time.h): calls, kernels and copies take the time of the figures that
//             fake_set_figure has set, and work runs when the program's clock has reached its end. Hollow: kernels
//             and large copies take their time and do nothing, so that a training of any size runs in no memory
// But for `threaded` everything is a function of the seed and of the calls made. Captured work is kept, not run
// (fake_replay runs it). Illegal use that a real driver would answer with undefined behaviour ends the process, or is
// counted and left undone (fake_set_lenient).
// Environment, for programs that do not call fake_reset: FAKE_DRIVER_MODE, _SEED, _MEMORY (bytes), _DEVICES.
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "device_kernels.cu"
#include "driver.h"
#include "virtual_time.h"

namespace {

enum Mode { kPrompt = 0, kRandom = 1, kLate = 2, kThreaded = 3, kTimed = 4 };
constexpr unsigned char kPoison = 0xA5;
constexpr size_t kPoisonLimit = 4 << 20;  // new memory up to this size is poisoned: more would take the time of tests
constexpr int kMaxDevices = 8;
constexpr uint64_t kDefaultMemory = uint64_t{1} << 30;

[[noreturn]] void Die(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fputs("fake driver: ", stderr);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  abort();
}

struct Range {
  uint64_t begin = 0;
  uint64_t end = 0;
  bool Meets(const Range& other) const { return begin < other.end && other.begin < end; }
};

using Clock = std::chrono::steady_clock;

struct Stream;

// One recording of an event. Waits hold the mark, not the event: it may be recorded anew, or destroyed, meanwhile.
struct Mark {
  bool passed = false;
  Stream* stream = nullptr;
  uint64_t position = 0;  // of the task that passes it, in its stream
  Clock::time_point when;
  double at = virtual_time::kUnknown;  // it passes; known as soon as the work before it has begun
  int behind = 0;                      // the label of that work
};
using MarkRef = std::shared_ptr<Mark>;

struct Task {
  MarkRef wait;               // until this has passed
  MarkRef pass;               // passes
  std::function<void()> run;  // or does this
  std::vector<Range> uses;    // device and page-locked memory
  virtual_time::Cost cost{};
  double issued = 0;     // by the program's clock
  uint64_t number = 0;   // of all tasks
  double end = 0;        // of a task that has begun
};

struct Device {
  int ordinal = 0;
  uint64_t used = 0;
  Stream* legacy = nullptr;
};

struct Stream {
  Device* device = nullptr;
  std::deque<Task> tasks;
  uint64_t queued = 0;  // since creation
  uint64_t done = 0;
  bool running = false;  // its first task, in some thread
  bool destroyed = false;
  int capture = CU_STREAM_CAPTURE_STATUS_NONE;
  std::vector<Task> captured;
  double weight = 1;
  bool timed = false;
  size_t begun = 0;     // of its tasks, by virtual time
  double time = 0;      // the end of the last of these
  double waited = 0;    // `time`, where a wait has put it off
  double done_at = 0;   // the end of the last task that is done
  int label = 0;        // of the last work that has begun
  int waited_for = 0;   // the label of the work that the last wait was for
};

struct Event {
  Device* device = nullptr;
  MarkRef mark;
  bool timing = false;
};

struct Allocation {
  uint64_t bytes = 0;
  Device* device = nullptr;
};

struct Physical {
  uint64_t bytes = 0;
  Device* device = nullptr;
  uint64_t offset = 0;  // in the one file
  int maps = 0;
  bool released = false;
};

struct Mapping {
  uint64_t bytes = 0;
  uint64_t handle = 0;
  bool accessible = false;
};

struct PageLocked {
  uint64_t bytes = 0;
  bool registered = false;  // the memory is the caller's
};

struct Fault {
  int after = 0;
  int code = 0;
  int times = 1;
};

struct Fake {
  std::mutex mutex;
  std::condition_variable changed;
  std::mt19937_64 dice;
  Mode mode = kPrompt;
  bool initialized = false;
  double pace = 1;
  int device_count = 2;
  uint64_t memory_bytes = kDefaultMemory;
  uint64_t granularity = 2 << 20;
  Device devices[kMaxDevices];
  std::vector<std::unique_ptr<Stream>> streams;  // the legacy ones too
  std::unordered_set<Stream*> alive;
  std::map<Event*, std::unique_ptr<Event>> events;
  std::map<uint64_t, Allocation> memory;      // MemAlloc
  std::map<uint64_t, uint64_t> reservations;  // address -> bytes
  std::map<uint64_t, Physical> physical;
  std::map<uint64_t, Mapping> mappings;
  std::map<uint64_t, PageLocked> host;
  std::map<std::string, uint64_t> calls;
  std::map<std::string, Fault> faults;
  bool integrated = false;
  int broken = 0;  // error that a kernel has caused: from then on all calls that need a context return it
  uint64_t next_handle = 1;
  int file = -1;
  uint64_t file_bytes = 0;
  uint64_t capture_violations = 0;
  std::vector<std::vector<Task>> graphs;
  bool lenient = false;
  uint64_t illegal_uses = 0;
  uint64_t queries = 0;  // that found work under way
  uint64_t workers = 0;
  uint64_t epoch = 0;  // of the workers: another one's end
  virtual_time::Time time;
  uint64_t tasks = 0;
  bool hollow = false;
  bool spoils = false;  // the next copy from page-locked memory

  double Chance() { return std::uniform_real_distribution<double>(0, 1)(dice); }
};

std::atomic<bool> forked{false};
thread_local Device* current = nullptr;
thread_local bool in_task = false;
thread_local int capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
thread_local virtual_time::HostClock host;
thread_local std::optional<virtual_time::Cost> next_work;  // of the next host function: fake_next_work

using Hold = std::unique_lock<std::mutex>;

void StartWorkers(Fake* fake);

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* text = getenv(name);
  return text != nullptr && *text != '\0' ? strtoull(text, nullptr, 10) : otherwise;
}

Stream* MakeStream(Fake* fake, Device* device) {
  fake->streams.push_back(std::make_unique<Stream>());
  Stream* stream = fake->streams.back().get();
  stream->device = device;
  stream->timed = fake->mode == kTimed;
  fake->alive.insert(stream);
  return stream;
}

void SetUp(Fake* fake, uint64_t seed, int mode) {
  fake->dice.seed(seed);
  fake->mode = static_cast<Mode>(mode);
  fake->pace = 1;
  fake->queries = 0;  // a test that asks once is not the 64th of the process
  fake->time.Reset();
  for (int i = 0; i < kMaxDevices; ++i) {
    fake->devices[i].ordinal = i;
    fake->devices[i].used = 0;
    fake->devices[i].legacy = MakeStream(fake, &fake->devices[i]);
  }
  if (mode == kThreaded) StartWorkers(fake);
}

// Never destroyed: threads may call while the process is ending.
Fake& Get() {
  static Fake* fake = [] {
    auto* made = new Fake;
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
    made->memory_bytes = FromEnvironment("FAKE_DRIVER_MEMORY", kDefaultMemory);
    made->device_count = static_cast<int>(FromEnvironment("FAKE_DRIVER_DEVICES", 2));
    made->file = memfd_create("fake_driver", MFD_CLOEXEC);
    if (made->file < 0) Die("memfd_create: %s", strerror(errno));
    const char* mode = getenv("FAKE_DRIVER_MODE");
    const std::string name = mode != nullptr ? mode : "prompt";
    const int number = name == "random" ? kRandom : name == "late" ? kLate : name == "threaded" ? kThreaded
                       : name == "timed"  ? kTimed
                                          : kPrompt;
    SetUp(made, FromEnvironment("FAKE_DRIVER_SEED", 0), number);
    return made;
  }();
  return *fake;
}

bool Runnable(Stream* stream) {
  if (stream->timed) return false;  // NextEvent
  while (!stream->running && !stream->tasks.empty()) {
    const Task& first = stream->tasks.front();
    if (first.wait == nullptr) return true;
    if (!first.wait->passed) return false;
    stream->tasks.pop_front();
    ++stream->done;
  }
  return false;
}

bool IsUsable(Fake* fake, uint64_t address, uint64_t bytes) {
  auto at = fake->memory.upper_bound(address);
  if (at != fake->memory.begin()) {
    --at;
    if (address + bytes <= at->first + at->second.bytes) return true;
  }
  const uint64_t end = address + bytes;
  auto map = fake->mappings.upper_bound(address);
  if (map == fake->mappings.begin()) return false;
  --map;
  while (true) {
    if (!map->second.accessible || address >= map->first + map->second.bytes) return false;
    address = map->first + map->second.bytes;
    if (address >= end) return true;
    if (++map == fake->mappings.end() || map->first != address) return false;
  }
}

bool IsPageLocked(Fake* fake, uint64_t address, uint64_t bytes) {
  auto at = fake->host.upper_bound(address);
  if (at == fake->host.begin()) return false;
  --at;
  return address + bytes <= at->first + at->second.bytes;
}

// Some of it, but not as one range: a driver takes no copy from or to such memory, nor does it lock it again.
bool IsPartlyPageLocked(Fake* fake, uint64_t address, uint64_t bytes) {
  auto at = fake->host.lower_bound(address + bytes);
  if (at == fake->host.begin()) return false;
  --at;
  return address < at->first + at->second.bytes && !IsPageLocked(fake, address, bytes);
}

// The system accesses the memory, so that there is no fault. Memory that cannot be written to cannot be locked.
bool IsWritable(uint64_t address, uint64_t bytes) {
  const int file = memfd_create("fake_driver_looks", MFD_CLOEXEC);
  bool writable = true;
  for (const uint64_t at : {address, address + bytes - 1}) {
    writable = writable && pwrite(file, reinterpret_cast<const void*>(at), 1, 0) == 1 &&
               pread(file, reinterpret_cast<void*>(at), 1, 0) == 1;
  }
  close(file);
  return writable;
}

// True: leave it undone.
bool Illegal(Fake* fake, const char* format, const char* what, uint64_t address) {
  if (!fake->lenient) Die(format, what, static_cast<unsigned long long>(address));
  ++fake->illegal_uses;
  return true;
}

void RunFirst(Fake* fake, Stream* stream, Hold* hold) {
  Task& task = stream->tasks.front();  // a deque's elements stay where they are while others are pushed
  for (const Range& range : task.uses) {
    const uint64_t bytes = range.end - range.begin;
    if (task.run && !IsUsable(fake, range.begin, bytes) && !IsPageLocked(fake, range.begin, bytes) &&
        Illegal(fake, "%s runs on memory that is not there, at %#llx", "work", range.begin)) {
      task.run = nullptr;
    }
  }
  stream->running = true;
  if (task.run) {
    hold->unlock();
    in_task = true;
    task.run();
    in_task = false;
    hold->lock();
  }
  if (task.pass != nullptr) {
    task.pass->passed = true;
    task.pass->when = Clock::now();
  }
  stream->running = false;
  stream->tasks.pop_front();
  ++stream->done;
  fake->changed.notify_all();
}

struct NextWork {
  Stream* stream = nullptr;
  bool begins = false;  // or ends
  double at = 0;
  uint64_t number = 0;
};

double BeginOf(Fake* fake, const Stream* stream, const Task& task) {
  double at = std::max(stream->time, task.issued);
  if (task.wait != nullptr) at = std::max(at, task.wait->at);
  const double* engine = fake->time.Engine(stream->device->ordinal, task.cost.engine);
  return engine != nullptr ? std::max(at, *engine) : at;
}

// Returns the next begin or end of work. Work that waits for work not yet begun is no candidate: its begin is later
// than some other begin.
NextWork NextEvent(Fake* fake) {
  NextWork next;
  const auto consider = [&](Stream* stream, bool begins, double at, uint64_t number) {
    if (next.stream != nullptr && (at > next.at || (at == next.at && number >= next.number))) return;
    next = {stream, begins, at, number};
  };
  for (const auto& each : fake->streams) {
    Stream* stream = each.get();
    if (stream->begun < stream->tasks.size()) {
      const Task& task = stream->tasks[stream->begun];
      if (task.wait == nullptr || task.wait->at != virtual_time::kUnknown) {
        consider(stream, true, BeginOf(fake, stream, task), task.number);
      }
    }
    if (stream->begun > 0 && !stream->running) {
      const Task& task = stream->tasks.front();
      if (task.wait == nullptr || task.wait->passed) consider(stream, false, task.end, task.number);
    }
  }
  return next;
}

void Begin(Fake* fake, const NextWork& next) {
  Stream* stream = next.stream;
  Task& task = stream->tasks[stream->begun++];
  task.end = next.at + task.cost.seconds;
  if (double* engine = fake->time.Engine(stream->device->ordinal, task.cost.engine)) {
    const auto bound = next.at <= task.issued          ? virtual_time::kByHost
                       : next.at <= stream->waited     ? virtual_time::kByWait
                       : next.at <= stream->time       ? virtual_time::kByStream
                                                       : virtual_time::kByEngine;
    fake->time.Note({task.cost.engine, task.cost.label, next.at, task.end, task.issued, bound,
                     bound == virtual_time::kByWait ? stream->waited_for : 0, task.cost.bytes});
    *engine = task.end;
    stream->label = task.cost.label;
  } else if (task.wait != nullptr && task.wait->at > std::max(stream->time, task.issued)) {
    stream->waited = task.end;
    stream->waited_for = task.wait->behind;
  }
  stream->time = task.end;
  if (task.pass != nullptr) {
    task.pass->at = task.end;
    task.pass->behind = stream->label;
  }
}

void Happen(Fake* fake, const NextWork& next, Hold* hold) {
  if (next.begins) {
    Begin(fake, next);
    return;
  }
  RunFirst(fake, next.stream, hold);
  --next.stream->begun;
  next.stream->done_at = next.at;
}

// Runs all work that is due by now. Work that another thread runs at this moment is left to that thread.
void CatchUp(Fake* fake, Hold* hold) {
  while (true) {
    const NextWork next = NextEvent(fake);
    if (next.stream == nullptr || next.at > fake->time.now) return;
    Happen(fake, next, hold);
  }
}

Stream* PickAny(Fake* fake) {
  std::vector<Stream*> ready;
  double sum = 0;
  for (const auto& stream : fake->streams) {
    if (Runnable(stream.get())) {
      ready.push_back(stream.get());
      sum += stream->weight;
    }
  }
  if (ready.empty()) return nullptr;
  double at = fake->Chance() * sum;
  for (Stream* stream : ready) {
    at -= stream->weight;
    if (at <= 0) return stream;
  }
  return ready.back();
}

// The stream whose next task has to run before this one's can: as little as possible is done.
Stream* PickFor(Stream* wanted) {
  while (!Runnable(wanted)) {
    if (wanted->running || wanted->tasks.empty()) return nullptr;
    const Task& first = wanted->tasks.front();
    if (first.wait->stream == wanted) Die("a stream waits for itself");
    wanted = first.wait->stream;
  }
  return wanted;
}

// Runs work until `done` returns true. `wanted` NULL: the work of any stream.
template <typename Done>
void RunUntil(Fake* fake, Stream* wanted, Hold* hold, Done done) {
  while (fake->mode == kTimed && !done()) {
    const NextWork next = NextEvent(fake);
    bool running = false;
    for (const auto& stream : fake->streams) running = running || stream->running;
    if (running) {
      fake->changed.wait(*hold);
    } else if (next.stream != nullptr) {
      Happen(fake, next, hold);
    } else {
      Die("somebody waits for work that can never run");
    }
  }
  if (fake->mode == kThreaded) fake->changed.notify_all();  // the call that waits may also have queued
  while (!done()) {
    if (fake->mode == kThreaded && !in_task) {
      fake->changed.wait(*hold);
      continue;
    }
    Stream* next = fake->mode == kLate && wanted != nullptr ? PickFor(wanted) : PickAny(fake);
    if (next != nullptr) {
      RunFirst(fake, next, hold);
      continue;
    }
    bool running = false;
    for (const auto& stream : fake->streams) running = running || stream->running;
    if (!running) Die("somebody waits for work that can never run");
    fake->changed.wait(*hold);  // another thread runs it
  }
}

void Drain(Fake* fake, Hold* hold) {
  RunUntil(fake, nullptr, hold, [&] {
    for (const auto& stream : fake->streams) {
      Runnable(stream.get());  // drops waits that have passed
      if (!stream->tasks.empty()) return false;
    }
    return true;
  });
  for (const auto& stream : fake->streams) fake->time.Reach(&host, stream->done_at, "drain");
}

void SettleStream(Fake* fake, Stream* stream, Hold* hold, const char* what) {
  const uint64_t until = stream->queued;
  RunUntil(fake, stream, hold, [&] {
    Runnable(stream);
    return stream->done >= until;
  });
  if (until > 0) fake->time.Reach(&host, stream->done_at, what);
}

void SettleDevice(Fake* fake, Device* device, Hold* hold, const char* what) {
  for (size_t i = 0; i < fake->streams.size(); ++i) {
    Stream* stream = fake->streams[i].get();
    if (stream->device == device) SettleStream(fake, stream, hold, what);
  }
}

// The device goes on while the CPU makes calls: between nothing at all and everything.
void TimePasses(Fake* fake, Hold* hold) {
  if (fake->mode == kPrompt) {
    while (Stream* next = PickAny(fake)) RunFirst(fake, next, hold);
  } else if (fake->mode == kRandom) {
    if (fake->Chance() < 0.05) {
      constexpr double kWeights[] = {0.01, 0.1, 1, 1, 10};
      constexpr double kPaces[] = {0, 0.3, 1, 4};
      for (const auto& stream : fake->streams) stream->weight = kWeights[fake->dice() % 5];
      fake->pace = kPaces[fake->dice() % 4];
    }
    for (int steps = static_cast<int>(fake->Chance() * 2 * fake->pace + 0.5); steps > 0; --steps) {
      if (Stream* next = PickAny(fake)) RunFirst(fake, next, hold);
    }
  } else if (fake->mode == kThreaded) {
    fake->changed.notify_all();
  } else if (fake->mode == kTimed) {
    CatchUp(fake, hold);
  }
}

CUresult NotReady(Fake* fake, Stream* asked, Hold* hold) {
  constexpr uint64_t kPatience = 64;
  if (fake->mode == kLate && ++fake->queries % kPatience == 0) {
    if (Stream* next = PickFor(asked)) RunFirst(fake, next, hold);
  }
  return CUDA_ERROR_NOT_READY;
}

void ForgetDestroyed(Fake* fake) {
  std::erase_if(fake->streams, [&](const std::unique_ptr<Stream>& stream) {
    Runnable(stream.get());
    const bool over = stream->destroyed && stream->tasks.empty();
    if (over) fake->alive.erase(stream.get());
    return over;
  });
}

void Work(Fake* fake, uint64_t epoch) {
  Hold hold(fake->mutex);
  while (fake->epoch == epoch) {
    Stream* next = PickAny(fake);
    if (next == nullptr) {
      fake->changed.wait(hold);
      continue;
    }
    if (fake->Chance() < 0.3) {
      const auto pause = std::chrono::microseconds(fake->dice() % 200);
      hold.unlock();
      std::this_thread::sleep_for(pause);
      hold.lock();
      continue;  // another worker may have taken it
    }
    RunFirst(fake, next, &hold);
  }
  --fake->workers;
  fake->changed.notify_all();
}

void StartWorkers(Fake* fake) {
  for (int i = 0; i < 3; ++i) {
    ++fake->workers;
    // Detached: a worker may be inside a test's host function when the process ends.
    std::thread(Work, fake, fake->epoch).detach();
  }
}

void Push(Fake* fake, Stream* stream, Task task) {
  task.issued = fake->time.Now(host);
  task.number = ++fake->tasks;
  stream->tasks.push_back(std::move(task));
  ++stream->queued;
}

// The common begin of every entry point. If `error` is set, the entry point returns it.
struct Call {
  Fake& fake;
  Hold hold;
  CUresult error = CUDA_SUCCESS;

  explicit Call(const char* name, bool needs_context = true) : fake(Get()) {
    if (forked) {
      error = CUDA_ERROR_NOT_INITIALIZED;
      return;
    }
    if (in_task) {
      error = CUDA_ERROR_NOT_PERMITTED;
      return;
    }
    hold = Hold(fake.mutex);
    std::string plain = name;
    if (plain.ends_with("_v2")) plain.resize(plain.size() - 3);
    ++fake.calls[plain];
    if (fake.mode == kTimed) {
      fake.time.Spend(&host, fake.time.OfCall(plain, current != nullptr ? current->ordinal : 0), plain);
      CatchUp(&fake, &hold);
    }
    const auto fault = fake.faults.find(plain);
    if (fault != fake.faults.end() && fault->second.after-- <= 0) {
      error = fault->second.code;
      if (--fault->second.times == 0) fake.faults.erase(fault);
      return;
    }
    if (capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED && IsUnsafe(plain)) {
      for (const auto& stream : fake.streams) {
        if (stream->capture != CU_STREAM_CAPTURE_STATUS_NONE && RefusedByCapture(stream.get())) return;
      }
    }
    if (!fake.initialized && plain != "cuInit") {
      error = CUDA_ERROR_NOT_INITIALIZED;
    } else if (needs_context && current == nullptr) {
      error = CUDA_ERROR_INVALID_CONTEXT;
    } else if (needs_context) {
      error = fake.broken;
    }
  }
  ~Call() {
    if (hold.owns_lock()) TimePasses(&fake, &hold);
  }

  // Calls that any thread's capture forbids every thread, unless that thread's mode is relaxed.
  static bool IsUnsafe(const std::string& name) {
    static const std::set<std::string> names = {
        "cuMemAlloc",       "cuMemFree",        "cuMemCreate",      "cuMemMap",          "cuMemUnmap",
        "cuMemSetAccess",   "cuMemHostAlloc",   "cuMemFreeHost",    "cuMemHostRegister", "cuMemHostUnregister",
        "cuStreamQuery",    "cuEventQuery",     "cuCtxSynchronize", "cuModuleLoadData",
    };
    return names.count(name) > 0;
  }
  // NULL and cudaStreamLegacy: the current device's default stream.
  Stream* Find(CUstream handle) {
    if (handle == nullptr || handle == reinterpret_cast<CUstream>(1) || handle == reinterpret_cast<CUstream>(2)) {
      return current->legacy;
    }
    auto* stream = static_cast<Stream*>(handle);
    if (fake.alive.count(stream) == 0 || stream->destroyed) {
      error = CUDA_ERROR_INVALID_HANDLE;
      return nullptr;
    }
    return stream;
  }
  Event* Find(CUevent handle) {
    const auto at = fake.events.find(reinterpret_cast<Event*>(handle));
    if (at == fake.events.end()) {
      error = CUDA_ERROR_INVALID_HANDLE;
      return nullptr;
    }
    return at->second.get();
  }
  // Refuses ordering that a capture forbids, or that would not have the effect there that the caller expects.
  bool RefusedByCapture(const Stream* stream) {
    if (stream->capture == CU_STREAM_CAPTURE_STATUS_NONE) return false;
    ++fake.capture_violations;
    error = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return true;
  }
  void Queue(Stream* stream, Task task) {
    if (stream->capture != CU_STREAM_CAPTURE_STATUS_NONE) {
      stream->captured.push_back(std::move(task));
      return;
    }
    Push(&fake, stream, std::move(task));
    fake.changed.notify_all();  // the workers: this very call may wait for them
  }
  void MustNotBeUsed(const char* what, Range range) {
    for (const auto& stream : fake.streams) {
      for (Task& task : stream->tasks) {
        for (const Range& used : task.uses) {
          if (task.run && used.Meets(range) &&
              Illegal(&fake, "%s of memory that queued work still uses, at %#llx", what, range.begin)) {
            const bool runs_now = stream->running && &task == &stream->tasks.front();
            if (!runs_now) task.run = nullptr;
          }
        }
      }
    }
  }
  CUresult QueueCopy(Stream* stream, uint64_t to, uint64_t from, size_t bytes, virtual_time::Engine engine);
};

CUresult Call::QueueCopy(Stream* stream, uint64_t to, uint64_t from, size_t bytes, virtual_time::Engine engine) {
  if (stream->device != current) return CUDA_ERROR_INVALID_CONTEXT;
  const size_t middle = fake.mode == kTimed ? bytes : bytes / 2;
  const bool hollow = fake.hollow && bytes > virtual_time::kSolidBytes;
  for (const Range part : {Range{0, middle}, Range{middle, bytes}}) {
    if (part.begin == part.end) continue;
    const size_t length = hollow ? 0 : part.end - part.begin;
    auto* target = reinterpret_cast<void*>(to + part.begin);
    const auto* source = reinterpret_cast<const void*>(from + part.begin);
    Queue(stream, {.run = [=] { memcpy(target, source, length); },
                   .uses = {{to + part.begin, to + part.end}, {from + part.begin, from + part.end}},
                   .cost = fake.time.OfCopy(engine, part.end - part.begin)});
  }
  return CUDA_SUCCESS;
}

void* MapAnonymous(size_t bytes, int protection) {
  void* memory = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

// Addresses are not given back: nothing else can come to lie there, so a late access always crashes.
void Forbid(uint64_t address, size_t bytes) {
  void* at = mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE,
                  MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) Die("mmap: %s", strerror(errno));
}

void GiveBackPhysical(Fake* fake, uint64_t handle) {
  Physical& physical = fake->physical.at(handle);
  if (!physical.released || physical.maps > 0) return;
  if (fallocate(fake->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(physical.offset),
                static_cast<off_t>(physical.bytes)) != 0) {
    Die("fallocate: %s", strerror(errno));
  }
  physical.device->used -= physical.bytes;
  fake->physical.erase(handle);
}

// Waits for the device in virtual time, as these calls do on a GPU for memory of any kind.
void WaitsForDevice(Call* call, const char* name) {
  if (call->fake.mode == kTimed && current != nullptr) SettleDevice(&call->fake, current, &call->hold, name);
}

bool TakeMemory(Fake* fake, Device* device, uint64_t bytes) {
  if (bytes > fake->memory_bytes || device->used > fake->memory_bytes - bytes) return false;
  device->used += bytes;
  return true;
}

}  // namespace

extern "C" {

#define BEGIN(name, ...)          \
  Call call(name, ##__VA_ARGS__); \
  if (call.error != 0) return call.error;
#define STREAM(variable, handle)        \
  Stream* variable = call.Find(handle); \
  if (variable == nullptr) return call.error;
#define EVENT(variable, handle)        \
  Event* variable = call.Find(handle); \
  if (variable == nullptr) return call.error;

CUresult cuInit(unsigned flags) {
  BEGIN("cuInit", false);
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  call.fake.initialized = true;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  switch (error) {
    case CUDA_SUCCESS:
      *text = "no error";
      break;
    case CUDA_ERROR_INVALID_VALUE:
      *text = "invalid argument";
      break;
    case CUDA_ERROR_OUT_OF_MEMORY:
      *text = "out of memory";
      break;
    case CUDA_ERROR_NOT_INITIALIZED:
      *text = "initialization error";
      break;
    case CUDA_ERROR_INVALID_CONTEXT:
      *text = "invalid device context";
      break;
    case CUDA_ERROR_INVALID_HANDLE:
      *text = "invalid resource handle";
      break;
    case CUDA_ERROR_NOT_READY:
      *text = "device not ready";
      break;
    case CUDA_ERROR_ILLEGAL_ADDRESS:
      *text = "an illegal memory access was encountered";
      break;
    case CUDA_ERROR_NOT_SUPPORTED:
      *text = "operation not supported";
      break;
    case CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED:
      *text = "operation not permitted when stream is capturing";
      break;
    default:
      *text = nullptr;
      return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  BEGIN("cuDeviceGet", false);
  if (ordinal < 0 || ordinal >= call.fake.device_count) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  BEGIN("cuDeviceGetCount", false);
  *count = call.fake.device_count;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  BEGIN("cuDevicePrimaryCtxRetain", false);
  if (device < 0 || device >= call.fake.device_count) return CUDA_ERROR_INVALID_DEVICE;
  *context = reinterpret_cast<CUcontext>(&call.fake.devices[device]);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  BEGIN("cuCtxGetCurrent", false);
  *context = reinterpret_cast<CUcontext>(current);
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  BEGIN("cuCtxSetCurrent", false);
  auto* device = reinterpret_cast<Device*>(context);
  if (device != nullptr && (device < call.fake.devices || device >= call.fake.devices + call.fake.device_count)) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  current = device;
  return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize() {
  BEGIN("cuCtxSynchronize");
  for (const auto& stream : call.fake.streams) {
    if (stream->device == current && call.RefusedByCapture(stream.get())) return call.error;
  }
  for (size_t i = 0; i < call.fake.streams.size(); ++i) {
    Stream* stream = call.fake.streams[i].get();
    if (stream->device == current) SettleStream(&call.fake, stream, &call.hold, "cuCtxSynchronize");
  }
  return CUDA_SUCCESS;
}

CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
  BEGIN("cuMemGetInfo");
  *total_bytes = call.fake.memory_bytes;
  *free_bytes = current->used < call.fake.memory_bytes ? call.fake.memory_bytes - current->used : 0;
  return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
  BEGIN("cuMemAlloc");
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  if (!TakeMemory(&call.fake, current, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  void* memory = MapAnonymous(bytes, PROT_READ | PROT_WRITE);
  if (memory == nullptr) {
    current->used -= bytes;
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  if (bytes <= kPoisonLimit && !call.fake.hollow) memset(memory, kPoison, bytes);
  *address = reinterpret_cast<CUdeviceptr>(memory);
  call.fake.memory[*address] = {bytes, current};
  return CUDA_SUCCESS;
}

CUresult cuMemFree_v2(CUdeviceptr address) {
  BEGIN("cuMemFree");
  if (address == 0) return CUDA_SUCCESS;
  const auto at = call.fake.memory.find(address);
  if (at == call.fake.memory.end()) return CUDA_ERROR_INVALID_VALUE;
  WaitsForDevice(&call, "cuMemFree");
  call.MustNotBeUsed("cuMemFree", {address, address + at->second.bytes});
  Forbid(address, at->second.bytes);
  at->second.device->used -= at->second.bytes;
  call.fake.memory.erase(at);
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr,
                             unsigned long long flags) {
  BEGIN("cuMemAddressReserve");
  const uint64_t granularity = call.fake.granularity;
  if (bytes == 0 || bytes % granularity != 0 || flags != 0 || (alignment & (alignment - 1)) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const size_t align = alignment > granularity ? alignment : granularity;
  void* memory = MapAnonymous(bytes + align, PROT_NONE);
  if (memory == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = (reinterpret_cast<CUdeviceptr>(memory) + align - 1) / align * align;
  call.fake.reservations[*address] = bytes;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  BEGIN("cuMemAddressFree");
  const auto at = call.fake.reservations.find(address);
  if (at == call.fake.reservations.end() || at->second != bytes) return CUDA_ERROR_INVALID_VALUE;
  const auto map = call.fake.mappings.lower_bound(address);
  if (map != call.fake.mappings.end() && map->first < address + bytes) return CUDA_ERROR_INVALID_VALUE;
  call.fake.reservations.erase(at);  // the addresses stay forbidden
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* properties,
                     unsigned long long flags) {
  BEGIN("cuMemCreate");
  Fake& fake = call.fake;
  if (bytes == 0 || bytes % fake.granularity != 0 || flags != 0 || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
      properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE || properties->location.id < 0 ||
      properties->location.id >= fake.device_count) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Device* device = &fake.devices[properties->location.id];
  if (!TakeMemory(&fake, device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  // Offsets are never used twice: the file is sparse, and freed ranges are punched out.
  if (ftruncate(fake.file, static_cast<off_t>(fake.file_bytes + bytes)) != 0) {
    device->used -= bytes;
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *handle = fake.next_handle++;
  fake.physical[*handle] = {bytes, device, fake.file_bytes, 0, false};
  fake.file_bytes += bytes;
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  BEGIN("cuMemRelease");
  const auto at = call.fake.physical.find(handle);
  if (at == call.fake.physical.end() || at->second.released) return CUDA_ERROR_INVALID_VALUE;
  at->second.released = true;
  GiveBackPhysical(&call.fake, handle);
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  BEGIN("cuMemMap");
  Fake& fake = call.fake;
  const auto at = fake.physical.find(handle);
  auto reserved = fake.reservations.upper_bound(address);
  if (at == fake.physical.end() || at->second.released || bytes != at->second.bytes || offset != 0 || flags != 0 ||
      address % fake.granularity != 0 || reserved == fake.reservations.begin()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  --reserved;
  if (address + bytes > reserved->first + reserved->second) return CUDA_ERROR_INVALID_VALUE;
  const auto after = fake.mappings.lower_bound(address);
  if (after != fake.mappings.end() && after->first < address + bytes) return CUDA_ERROR_INVALID_VALUE;
  if (after != fake.mappings.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second.bytes > address) return CUDA_ERROR_INVALID_VALUE;
  }
  void* memory = mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_FIXED | MAP_SHARED, fake.file,
                      static_cast<off_t>(at->second.offset));
  if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  ++at->second.maps;
  fake.mappings[address] = {bytes, handle, false};
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  BEGIN("cuMemUnmap");
  Fake& fake = call.fake;
  std::vector<uint64_t> found;
  uint64_t end = address;
  for (auto at = fake.mappings.find(address); at != fake.mappings.end() && at->first == end && end < address + bytes;
       ++at) {
    found.push_back(at->first);
    end += at->second.bytes;
  }
  if (end != address + bytes) return CUDA_ERROR_INVALID_VALUE;
  call.MustNotBeUsed("cuMemUnmap", {address, end});
  if (fake.mode == kTimed)  // whether the driver takes less for several mappings is not known
    for (size_t i = 1; i < found.size(); ++i)
      fake.time.Spend(&host, fake.time.OfCall("cuMemUnmap", current->ordinal), "cuMemUnmap");
  Forbid(address, bytes);
  for (const uint64_t one : found) {
    const uint64_t handle = fake.mappings[one].handle;
    fake.mappings.erase(one);
    --fake.physical.at(handle).maps;
    GiveBackPhysical(&fake, handle);
  }
  return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access, size_t count) {
  BEGIN("cuMemSetAccess");
  Fake& fake = call.fake;
  if (count < 1 || access->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
  uint64_t end = address;
  for (auto at = fake.mappings.find(address); at != fake.mappings.end() && at->first == end && end < address + bytes;
       ++at) {
    end += at->second.bytes;
  }
  if (end != address + bytes || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  const bool writable = access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  if (mprotect(reinterpret_cast<void*>(address), bytes, writable ? PROT_READ | PROT_WRITE : PROT_NONE) != 0) {
    Die("mprotect: %s", strerror(errno));
  }
  for (uint64_t at = address; at < end; at += fake.mappings[at].bytes) {
    Mapping& mapping = fake.mappings[at];
    // The content of a handle that is mapped again is undefined, too; that of one which has another mapping stays.
    const bool alone = fake.physical.at(mapping.handle).maps == 1;
    if (writable && !mapping.accessible && alone && mapping.bytes <= kPoisonLimit && !fake.hollow) {
      memset(reinterpret_cast<void*>(at), kPoison, mapping.bytes);
    }
    mapping.accessible = writable;
  }
  return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp* properties, int) {
  BEGIN("cuMemGetAllocationGranularity");
  if (properties->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
  *bytes = call.fake.granularity;
  return CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  BEGIN("cuMemHostAlloc");
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  *memory = MapAnonymous(bytes, PROT_READ | PROT_WRITE);
  if (*memory == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  if (bytes <= kPoisonLimit && !call.fake.hollow) memset(*memory, kPoison, bytes);
  call.fake.time.Spend(&host, call.fake.time.OfLocking("host_alloc", bytes), "cuMemHostAlloc");
  call.fake.host[reinterpret_cast<uint64_t>(*memory)] = {bytes, false};
  return CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void* memory) {
  BEGIN("cuMemFreeHost");
  const auto address = reinterpret_cast<uint64_t>(memory);
  const auto at = call.fake.host.find(address);
  if (at == call.fake.host.end() || at->second.registered) return CUDA_ERROR_INVALID_VALUE;
  WaitsForDevice(&call, "cuMemFreeHost");
  call.MustNotBeUsed("cuMemFreeHost", {address, address + at->second.bytes});
  Forbid(address, at->second.bytes);
  call.fake.host.erase(at);
  return CUDA_SUCCESS;
}

CUresult cuMemHostRegister_v2(void* memory, size_t bytes, unsigned flags) {
  BEGIN("cuMemHostRegister");
  constexpr unsigned kPortable = 1;
  const auto address = reinterpret_cast<uint64_t>(memory);
  if (memory == nullptr || bytes == 0 || flags > kPortable) return CUDA_ERROR_INVALID_VALUE;
  if (IsPageLocked(&call.fake, address, bytes) || IsPartlyPageLocked(&call.fake, address, bytes)) {
    return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  }
  if (!IsWritable(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
  call.fake.host[address] = {bytes, true};
  call.fake.time.Spend(&host, call.fake.time.OfLocking("host_register", bytes), "cuMemHostRegister");
  return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void* memory) {
  BEGIN("cuMemHostUnregister");
  const auto address = reinterpret_cast<uint64_t>(memory);
  const auto at = call.fake.host.find(address);
  if (at == call.fake.host.end() || !at->second.registered) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  WaitsForDevice(&call, "cuMemHostUnregister");
  call.MustNotBeUsed("cuMemHostUnregister", {address, address + at->second.bytes});
  call.fake.host.erase(at);
  return CUDA_SUCCESS;
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream handle) {
  BEGIN("cuMemcpyHtoDAsync");
  STREAM(stream, handle);
  if (bytes == 0) return CUDA_SUCCESS;
  if (!IsUsable(&call.fake, to, bytes)) return CUDA_ERROR_INVALID_VALUE;
  const auto source = reinterpret_cast<uint64_t>(from);
  if (IsPageLocked(&call.fake, source, bytes)) {
    const CUresult error = call.QueueCopy(stream, to, source, bytes, virtual_time::kIn);
    if (error == CUDA_SUCCESS && std::exchange(call.fake.spoils, false))
      call.Queue(stream, {.run = [=] { *reinterpret_cast<char*>(to) ^= 1; }, .uses = {{to, to + 1}}});
    return error;
  }
  if (IsPartlyPageLocked(&call.fake, source, bytes)) return CUDA_ERROR_INVALID_VALUE;
  // Pageable memory is read before the call returns.
  call.fake.calls["pageable bytes"] += bytes;
  if (stream->device != current) return CUDA_ERROR_INVALID_CONTEXT;
  auto staged = std::make_shared<std::string>(static_cast<const char*>(from), bytes);
  const virtual_time::Cost cost = call.fake.time.OfPageable(virtual_time::kIn, bytes);
  call.fake.time.Spend(&host, cost.seconds, "pageable copy");
  call.Queue(stream, {.run = [=] { memcpy(reinterpret_cast<void*>(to), staged->data(), bytes); },
                      .uses = {{to, to + bytes}},
                      .cost = cost});
  return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream handle) {
  BEGIN("cuMemcpyDtoHAsync");
  STREAM(stream, handle);
  if (bytes == 0) return CUDA_SUCCESS;
  if (!IsUsable(&call.fake, from, bytes)) return CUDA_ERROR_INVALID_VALUE;
  const auto target = reinterpret_cast<uint64_t>(to);
  if (IsPageLocked(&call.fake, target, bytes)) return call.QueueCopy(stream, target, from, bytes, virtual_time::kOut);
  if (IsPartlyPageLocked(&call.fake, target, bytes)) return CUDA_ERROR_INVALID_VALUE;
  // Pageable memory has been written when the call returns.
  call.fake.calls["pageable bytes"] += bytes;
  if (stream->device != current) return CUDA_ERROR_INVALID_CONTEXT;
  if (call.RefusedByCapture(stream)) return call.error;
  call.Queue(stream, {.run = [=] { memcpy(to, reinterpret_cast<void*>(from), bytes); },
                      .uses = {{from, from + bytes}},
                      .cost = call.fake.time.OfPageable(virtual_time::kOut, bytes)});
  SettleStream(&call.fake, stream, &call.hold, "pageable copy");
  return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream handle) {
  BEGIN("cuMemcpyDtoDAsync");
  STREAM(stream, handle);
  if (bytes == 0) return CUDA_SUCCESS;
  if (!IsUsable(&call.fake, from, bytes) || !IsUsable(&call.fake, to, bytes)) return CUDA_ERROR_INVALID_VALUE;
  return call.QueueCopy(stream, to, from, bytes, virtual_time::kCompute);
}

// Either side may be memory of a device or of the host.
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream handle) {
  bool to_device = false, from_device = false;
  {
    BEGIN("cuMemcpyAsync");
    to_device = IsUsable(&call.fake, to, bytes);
    from_device = IsUsable(&call.fake, from, bytes);
  }
  if (to_device && from_device) return cuMemcpyDtoDAsync_v2(to, from, bytes, handle);
  if (to_device) return cuMemcpyHtoDAsync_v2(to, reinterpret_cast<const void*>(from), bytes, handle);
  return cuMemcpyDtoHAsync_v2(reinterpret_cast<void*>(to), from, bytes, handle);
}

CUresult cuThreadExchangeStreamCaptureMode(int* mode) {
  BEGIN("cuThreadExchangeStreamCaptureMode", false);
  std::swap(*mode, capture_mode);
  return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream* handle, unsigned flags) {
  BEGIN("cuStreamCreate");
  if (flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  ForgetDestroyed(&call.fake);
  *handle = MakeStream(&call.fake, current);
  return CUDA_SUCCESS;
}

CUresult cuStreamDestroy_v2(CUstream handle) {
  BEGIN("cuStreamDestroy");
  if (handle == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  STREAM(stream, handle);
  stream->destroyed = true;  // queued work still runs
  ForgetDestroyed(&call.fake);
  return CUDA_SUCCESS;
}

// Work may have run in the name of a thread whose clock is ahead of the program's.
static bool HasPassed(Fake* fake, const Mark& mark) {
  return mark.passed && (fake->mode != kTimed || mark.at <= fake->time.Now(host));
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned flags) {
  BEGIN("cuStreamWaitEvent");
  STREAM(stream, handle);
  EVENT(event, event_handle);
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (call.RefusedByCapture(stream)) return call.error;
  if (event->mark == nullptr || HasPassed(&call.fake, *event->mark) || event->mark->stream == stream) return CUDA_SUCCESS;
  call.Queue(stream, {.wait = event->mark});
  return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream handle) {
  BEGIN("cuStreamSynchronize");
  STREAM(stream, handle);
  if (call.RefusedByCapture(stream)) return call.error;
  SettleStream(&call.fake, stream, &call.hold, "cuStreamSynchronize");
  return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream handle) {
  BEGIN("cuStreamQuery");
  STREAM(stream, handle);
  if (call.RefusedByCapture(stream)) return call.error;
  Runnable(stream);
  const bool over = stream->done == stream->queued;
  return over && stream->done_at <= call.fake.time.Now(host) ? CUDA_SUCCESS : NotReady(&call.fake, stream, &call.hold);
}

CUresult cuStreamIsCapturing(CUstream handle, int* status) {
  BEGIN("cuStreamIsCapturing");
  STREAM(stream, handle);
  *status = stream->capture;
  return CUDA_SUCCESS;
}

// Programs that capture ask this, memmgr never does. A graph is the stream that it was captured on.
CUresult cuStreamBeginCapture_v2(CUstream handle, int) {
  BEGIN("cuStreamBeginCapture");
  STREAM(stream, handle);
  if (call.RefusedByCapture(stream)) return call.error;
  stream->captured.clear();
  stream->capture = CU_STREAM_CAPTURE_STATUS_ACTIVE;
  return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream handle, void** graph) {
  BEGIN("cuStreamEndCapture");
  STREAM(stream, handle);
  if (stream->capture == CU_STREAM_CAPTURE_STATUS_NONE) return CUDA_ERROR_INVALID_VALUE;
  stream->capture = CU_STREAM_CAPTURE_STATUS_NONE;
  *graph = stream;
  return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(void* graph) { return graph != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }

CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
  BEGIN("cuDeviceGetAttribute", false);
  if (device < 0 || device >= call.fake.device_count) return CUDA_ERROR_INVALID_DEVICE;
  *value = attribute == CU_DEVICE_ATTRIBUTE_INTEGRATED && !call.fake.integrated ? 0 : 1;
  return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent* handle, unsigned flags) {
  BEGIN("cuEventCreate");
  auto event = std::make_unique<Event>();
  event->device = current;
  event->timing = (flags & CU_EVENT_DISABLE_TIMING) == 0;
  *handle = reinterpret_cast<CUevent>(event.get());
  Event* key = event.get();
  call.fake.events[key] = std::move(event);
  return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event_handle, CUstream handle) {
  BEGIN("cuEventRecord");
  STREAM(stream, handle);
  EVENT(event, event_handle);
  if (event->device != stream->device) return CUDA_ERROR_INVALID_HANDLE;
  if (call.RefusedByCapture(stream)) return call.error;
  event->mark = std::make_shared<Mark>();
  event->mark->stream = stream;
  if (event->timing) call.fake.time.Spend(&host, call.fake.time.Figure("timed_record"), "cuEventRecord");
  call.Queue(stream, {.pass = event->mark});
  return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent event_handle) {
  BEGIN("cuEventQuery");
  EVENT(event, event_handle);
  if (event->mark == nullptr || HasPassed(&call.fake, *event->mark)) return CUDA_SUCCESS;
  return NotReady(&call.fake, event->mark->stream, &call.hold);
}

CUresult cuEventSynchronize(CUevent event_handle) {
  BEGIN("cuEventSynchronize");
  EVENT(event, event_handle);
  const MarkRef mark = event->mark;
  if (mark == nullptr) return CUDA_SUCCESS;
  RunUntil(&call.fake, mark->stream, &call.hold, [&] { return mark->passed; });
  if (call.fake.mode == kTimed) call.fake.time.Reach(&host, mark->at, "cuEventSynchronize");
  return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime(float* milliseconds, CUevent start_handle, CUevent end_handle) {
  BEGIN("cuEventElapsedTime");
  EVENT(start, start_handle);
  EVENT(end, end_handle);
  if (!start->timing || !end->timing || start->mark == nullptr || end->mark == nullptr) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (!start->mark->passed || !end->mark->passed) return CUDA_ERROR_NOT_READY;
  *milliseconds = std::chrono::duration<float, std::milli>(end->mark->when - start->mark->when).count();
  if (call.fake.mode == kTimed) *milliseconds = static_cast<float>(1e3 * (end->mark->at - start->mark->at));
  return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent event_handle) {
  BEGIN("cuEventDestroy");
  EVENT(event, event_handle);
  call.fake.events.erase(event);
  return CUDA_SUCCESS;
}

CUresult cuLaunchHostFunc(CUstream handle, void (*function)(void*), void* user) {
  BEGIN("cuLaunchHostFunc");
  STREAM(stream, handle);
  if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
  host.program = true;  // a thread that launches
  const virtual_time::Cost cost = next_work.value_or(call.fake.time.OfKernel(0));
  next_work.reset();
  if (cost.engine != virtual_time::kNone) {
    call.fake.time.Spend(&host, call.fake.time.Figure("launch"), "launch");
    call.fake.time.Spend(&host, cost.host_seconds, "op");
  }
  call.Queue(stream, {.run = [=] { function(user); }, .cost = cost});
  return CUDA_SUCCESS;
}

// The kernels of the core by name, regardless of the image: each thread of a launch runs the function that the device's
// kernel calls, from the same source.
}  // extern "C"

namespace {

struct Launched {
  std::function<void()> run;
  std::vector<Range> uses;
  double seconds = 0;  // beside those of the bytes
};

uint64_t BytesOf(const std::vector<Range>& uses) {
  uint64_t bytes = 0;
  for (const Range& range : uses) bytes += range.end - range.begin;
  return bytes;
}

template <typename T>
T Argument(void** arguments, int number) {
  T value;
  memcpy(&value, arguments[number], sizeof value);
  return value;
}

template <typename Each>
void ForEachThread(uint64_t threads, Each each) {
  for (uint64_t number = 0; number < threads; ++number) each(memmgr_kernels::Share{number, threads});
}

Launched LaunchedSum(void** arguments, uint64_t threads) {
  const auto p = Argument<CUdeviceptr>(arguments, 0), result = Argument<CUdeviceptr>(arguments, 2);
  const auto bytes = Argument<uint64_t>(arguments, 1);
  return {[=] {
            uint64_t sum = 0;
            ForEachThread(threads, [&](memmgr_kernels::Share share) {
              sum += memmgr_kernels::SumOf(reinterpret_cast<const unsigned char*>(p), bytes, share);
            });
            *reinterpret_cast<uint64_t*>(result) += sum;
          },
          {{p, p + bytes}, {result, result + sizeof(uint64_t)}}};
}

Launched LaunchedCompare(void** arguments, uint64_t threads) {
  const auto a = Argument<CUdeviceptr>(arguments, 0), b = Argument<CUdeviceptr>(arguments, 1);
  const auto bytes = Argument<uint64_t>(arguments, 2), filled = Argument<uint64_t>(arguments, 3);
  const auto result = Argument<CUdeviceptr>(arguments, 4);
  return {[=] {
            ForEachThread(threads, [&](memmgr_kernels::Share share) {
              *reinterpret_cast<uint64_t*>(result) |= memmgr_kernels::CompareIn(
                  reinterpret_cast<const unsigned char*>(a), reinterpret_cast<const unsigned char*>(b), bytes, filled,
                  share);
            });
          },
          {{a, a + bytes}, {b, b + bytes}, {result, result + sizeof(uint64_t)}}};
}

Launched LaunchedFill(void** arguments, uint64_t threads) {
  const auto p = Argument<CUdeviceptr>(arguments, 0);
  const auto bytes = Argument<uint64_t>(arguments, 1), word = Argument<uint64_t>(arguments, 2);
  return {[=] {
            ForEachThread(threads, [&](memmgr_kernels::Share share) {
              memmgr_kernels::FillWith(reinterpret_cast<unsigned char*>(p), bytes, word, share);
            });
          },
          {{p, p + bytes}}};
}

Launched LaunchedWord(void** arguments, uint64_t) {
  const auto from = Argument<CUdeviceptr>(arguments, 0);
  auto* const to = Argument<uint64_t*>(arguments, 1);
  return {[=] { *to = *reinterpret_cast<const uint64_t*>(from); }, {{from, from + sizeof(uint64_t)}}};
}

Launched LaunchedDelay(void** arguments, uint64_t) {
  return {[] {}, {}, 1e-9 * static_cast<double>(Argument<uint64_t>(arguments, 0))};
}

struct Kernel {
  const char* name;
  Launched (*launched)(void** arguments, uint64_t threads);
};
Kernel kKernels[] = {{"mm_sum", LaunchedSum},
                     {"mm_compare", LaunchedCompare},
                     {"mm_fill", LaunchedFill},
                     {"mm_word", LaunchedWord},
                     {"mm_delay", LaunchedDelay}};

}  // namespace

extern "C" {

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  BEGIN("cuModuleLoadData");
  if (strstr(static_cast<const char*>(image), ".entry") == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *module = reinterpret_cast<CUmodule>(kKernels);
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) {
  BEGIN("cuModuleUnload");
  return module == reinterpret_cast<CUmodule>(kKernels) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  BEGIN("cuModuleGetFunction");
  for (Kernel& kernel : kKernels) {
    if (strcmp(kernel.name, name) != 0) continue;
    *function = reinterpret_cast<CUfunction>(&kernel);
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuLaunchKernel(CUfunction function, unsigned blocks, unsigned blocks_y, unsigned blocks_z, unsigned threads,
                        unsigned threads_y, unsigned threads_z, unsigned, CUstream handle, void** arguments, void**) {
  BEGIN("cuLaunchKernel");
  STREAM(stream, handle);
  if (stream->device != current) return CUDA_ERROR_INVALID_CONTEXT;
  if (blocks == 0 || threads == 0 || threads > 1024 || blocks_y * blocks_z * threads_y * threads_z != 1)
    return CUDA_ERROR_INVALID_VALUE;
  Launched launched =
      reinterpret_cast<Kernel*>(function)->launched(arguments, uint64_t{blocks} * uint64_t{threads});
  virtual_time::Cost cost = call.fake.time.OfKernel(BytesOf(launched.uses), reinterpret_cast<Kernel*>(function)->name);
  cost.seconds += launched.seconds;
  if (call.fake.hollow && BytesOf(launched.uses) > virtual_time::kSolidBytes) launched.run = [] {};
  call.Queue(stream, {.run = std::move(launched.run), .uses = std::move(launched.uses), .cost = cost});
  return CUDA_SUCCESS;
}

// Runs queued work, takes everything back (handles and addresses from before are invalid), forgets counts and
// faults.
void fake_reset(uint64_t seed, int mode) {
  Fake& fake = Get();
  Hold hold(fake.mutex);
  Drain(&fake, &hold);
  ++fake.epoch;
  fake.changed.notify_all();
  fake.changed.wait(hold, [&] { return fake.workers == 0; });
  for (const auto& [address, allocation] : fake.memory) Forbid(address, allocation.bytes);
  for (const auto& [address, mapping] : fake.mappings) Forbid(address, mapping.bytes);
  for (const auto& [address, locked] : fake.host) {
    if (!locked.registered) Forbid(address, locked.bytes);
  }
  fake.memory.clear();
  fake.mappings.clear();
  fake.host.clear();
  fake.physical.clear();
  fake.reservations.clear();
  fake.events.clear();
  fake.alive.clear();
  fake.streams.clear();
  fake.calls.clear();
  fake.faults.clear();
  fake.broken = 0;
  fake.integrated = false;
  fake.capture_violations = 0;
  fake.graphs.clear();
  fake.lenient = false;
  fake.illegal_uses = 0;
  if (ftruncate(fake.file, 0) != 0) Die("ftruncate: %s", strerror(errno));
  fake.file_bytes = 0;
  SetUp(&fake, seed, mode);
}

void fake_drain() {
  Fake& fake = Get();
  Hold hold(fake.mutex);
  Drain(&fake, &hold);
}

// The call of this name (as exported, the version may be left out) after the next `after` ones answers with `code`.
void fake_fail_next(const char* name, int after, int code) {
  Fake& fake = Get();
  Hold hold(fake.mutex);
  std::string plain = name;
  if (plain.ends_with("_v2")) plain.resize(plain.size() - 3);
  fake.faults[plain] = {after, code, 1};
}

// So do the next `times` calls of this name (without a version); 0: none does.
void fake_fail_times(const char* name, int times, int code) {
  Fake& fake = Get();
  Hold hold(fake.mutex);
  fake.faults.erase(name);
  if (times > 0) fake.faults[name] = {0, code, times};
}

// A kernel fails: the context is of no use from now on. 0: all is well.
void fake_break(int code) {
  Fake& fake = Get();
  Hold hold(fake.mutex);
  fake.broken = code;
}

void fake_set_integrated(int on) {
  Fake& fake = Get();
  Hold hold(fake.mutex);
  fake.integrated = on != 0;
}

uint64_t fake_call_count(const char* name) {
  Fake& fake = Get();
  Hold hold(fake.mutex);
  std::string plain = name;
  if (plain.ends_with("_v2")) plain.resize(plain.size() - 3);
  const auto at = fake.calls.find(plain);
  return at != fake.calls.end() ? at->second : 0;
}

void fake_set_memory(uint64_t bytes) {  // of each device; memory in use stays
  Fake& fake = Get();
  Hold hold(fake.mutex);
  fake.memory_bytes = bytes;
}

void fake_set_granularity(uint64_t bytes) {  // a power of two, at least a page
  Fake& fake = Get();
  Hold hold(fake.mutex);
  fake.granularity = bytes;
}

void fake_set_devices(int count) {
  Fake& fake = Get();
  Hold hold(fake.mutex);
  fake.device_count = count < kMaxDevices ? count : kMaxDevices;
}

// `handle` NULL: the default stream of device 0. When a capture ends its work is kept for fake_replay.
void fake_set_capturing(CUstream handle, int on) {
  Fake& fake = Get();
  Hold hold(fake.mutex);
  Stream* stream = handle != nullptr ? static_cast<Stream*>(handle) : fake.devices[0].legacy;
  if (on != 0) stream->captured.clear();
  stream->capture = on != 0 ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
}

// Queues the work that was captured on `captured` on the stream `handle`.
void fake_replay(CUstream captured, CUstream handle) {
  Fake& fake = Get();
  Hold hold(fake.mutex);
  Stream* from = captured != nullptr ? static_cast<Stream*>(captured) : fake.devices[0].legacy;
  Stream* stream = handle != nullptr ? static_cast<Stream*>(handle) : fake.devices[0].legacy;
  for (const Task& task : from->captured) {
    Push(&fake, stream, task);
  }
  TimePasses(&fake, &hold);
}

// Keeps the work captured last on the stream; later captures do not change it. Returns a number for fake_launch.
int fake_keep_graph(CUstream captured) {
  Fake& fake = Get();
  Hold hold(fake.mutex);
  Stream* from = captured != nullptr ? static_cast<Stream*>(captured) : fake.devices[0].legacy;
  fake.graphs.push_back(std::move(from->captured));
  from->captured.clear();
  return static_cast<int>(fake.graphs.size()) - 1;
}

void fake_launch(int graph, CUstream handle) {
  Fake& fake = Get();
  Hold hold(fake.mutex);
  Stream* stream = handle != nullptr ? static_cast<Stream*>(handle) : fake.devices[0].legacy;
  for (const Task& task : fake.graphs.at(static_cast<size_t>(graph))) {
    Push(&fake, stream, task);
  }
  TimePasses(&fake, &hold);
}

// Illegal uses do not end the process from now on until the next fake_reset.
void fake_set_lenient(int on) {
  Fake& fake = Get();
  Hold hold(fake.mutex);
  fake.lenient = on != 0;
}

uint64_t fake_illegal_uses() {
  Fake& fake = Get();
  Hold hold(fake.mutex);
  return fake.illegal_uses;
}

// Calls that a capture forbids, and did.
uint64_t fake_capture_violations() {
  Fake& fake = Get();
  Hold hold(fake.mutex);
  return fake.capture_violations;
}

// A figure of virtual time (virtual_time.h names them), in seconds, bytes and operations, and per second of these.
void fake_set_figure(const char* name, double value) {
  Fake& fake = Get();
  Hold hold(fake.mutex);
  fake.time.figures[name] = value;
}

double fake_figure(const char* name) {
  Fake& fake = Get();
  Hold hold(fake.mutex);
  return fake.time.Figure(name);
}

// The next copy from page-locked memory arrives with one bit changed.
void fake_spoil_next_copy() {
  Fake& fake = Get();
  Hold hold(fake.mutex);
  fake.spoils = true;
}

void fake_set_hollow(int on) {
  Fake& fake = Get();
  Hold hold(fake.mutex);
  fake.hollow = on != 0;
}

// Describes the next host function that this thread launches: its engine (virtual_time::Engine), its seconds there, the
// seconds of the host, and the bytes that it works on.
void fake_next_work(int engine, double seconds, double host_seconds, uint64_t bytes, const char* label) {
  Fake& fake = Get();
  Hold hold(fake.mutex);
  next_work = {static_cast<virtual_time::Engine>(engine), seconds, host_seconds, bytes, fake.time.Label(label)};
}

// Seconds, of the calling thread.
double fake_now() {
  Fake& fake = Get();
  Hold hold(fake.mutex);
  return fake.time.Now(host);
}

// Nanoseconds of the program's clock, without a lock.
uint64_t fake_nanoseconds() { return Get().time.published.load(std::memory_order_relaxed); }

// 1: records all work from now on, and forgets earlier records.
void fake_trace(int on) {
  Fake& fake = Get();
  Hold hold(fake.mutex);
  fake.time.tracing = on != 0;
  if (on != 0) fake.time.rows.clear();
}

uint64_t fake_trace_rows() {
  Fake& fake = Get();
  Hold hold(fake.mutex);
  return fake.time.rows.size();
}

// Rows of eight: engine, label, begin, end, issued, bound, label of the work that was waited for, bytes.
void fake_trace_read(double* out) {
  Fake& fake = Get();
  Hold hold(fake.mutex);
  for (const virtual_time::Row& row : fake.time.rows) {
    for (const double value : {double(row.engine), double(row.label), row.begin, row.end, row.issued, double(row.bound),
                               double(row.waited_for), double(row.bytes)}) {
      *out++ = value;
    }
  }
}

const char* fake_trace_label(int label) {
  Fake& fake = Get();
  Hold hold(fake.mutex);
  return fake.time.labels.at(static_cast<size_t>(label)).c_str();
}

// The present number of one kind: memory, bytes (of devices), handles, maps, reservations, host (page-locked ranges),
// host bytes, streams, events, work; NULL: all but work and the kinds that count bytes.
uint64_t fake_outstanding(const char* what) {
  Fake& fake = Get();
  Hold hold(fake.mutex);
  uint64_t streams = 0;
  uint64_t work = 0;
  for (const auto& stream : fake.streams) {
    Runnable(stream.get());
    streams += stream->destroyed ? 0 : 1;
    work += stream->tasks.size();
  }
  streams -= kMaxDevices;
  uint64_t bytes = 0;
  for (const Device& device : fake.devices) bytes += device.used;
  uint64_t host_bytes = 0;
  for (const auto& [address, locked] : fake.host) host_bytes += locked.bytes;
  const std::map<std::string, uint64_t> counts = {
      {"memory", fake.memory.size()}, {"handles", fake.physical.size()},
      {"maps", fake.mappings.size()}, {"reservations", fake.reservations.size()},
      {"host", fake.host.size()},     {"streams", streams},
      {"events", fake.events.size()},
  };
  if (what == nullptr) {
    uint64_t sum = 0;
    for (const auto& [name, count] : counts) sum += count;
    return sum;
  }
  if (strcmp(what, "bytes") == 0) return bytes;
  if (strcmp(what, "host bytes") == 0) return host_bytes;
  if (strcmp(what, "work") == 0) return work;
  const auto at = counts.find(what);
  if (at == counts.end()) Die("what is %s?", what);
  return at->second;
}

// Kernels for tests. Byte i of a fill is value + 7 i; a check adds the number of bytes that differ to *wrong.
static CUresult Launch(const char* name, CUstream handle, std::function<void()> run, std::vector<Range> uses) {
  Call call(name);
  if (call.error != 0) return call.error;
  Stream* stream = call.Find(handle);
  if (stream == nullptr) return call.error;
  host.program = true;
  const virtual_time::Cost cost = call.fake.time.OfKernel(BytesOf(uses), name);
  call.Queue(stream, {.run = std::move(run), .uses = std::move(uses), .cost = cost});
  return CUDA_SUCCESS;
}

CUresult fake_launch_fill(CUstream handle, CUdeviceptr address, uint64_t bytes, int value) {
  auto* at = reinterpret_cast<unsigned char*>(address);
  return Launch("fake_launch_fill", handle,
                [=] {
                  for (uint64_t i = 0; i < bytes; ++i) at[i] = static_cast<unsigned char>(value + 7 * i);
                },
                {{address, address + bytes}});
}

CUresult fake_launch_check(CUstream handle, CUdeviceptr address, uint64_t bytes, int value, uint64_t* wrong) {
  const auto* at = reinterpret_cast<const unsigned char*>(address);
  return Launch("fake_launch_check", handle,
                [=] {
                  uint64_t different = 0;
                  for (uint64_t i = 0; i < bytes; ++i) different += at[i] != static_cast<unsigned char>(value + 7 * i);
                  __atomic_fetch_add(wrong, different, __ATOMIC_SEQ_CST);
                },
                {{address, address + bytes}});
}

// Adds `delta` to every byte of `from`: a fill's bytes become those of value + delta. In place when to is from.
CUresult fake_launch_add(CUstream handle, CUdeviceptr to, CUdeviceptr from, uint64_t bytes, int delta) {
  auto* target = reinterpret_cast<unsigned char*>(to);
  const auto* source = reinterpret_cast<const unsigned char*>(from);
  return Launch("fake_launch_add", handle,
                [=] {
                  for (uint64_t i = 0; i < bytes; ++i) target[i] = static_cast<unsigned char>(source[i] + delta);
                },
                {{to, to + bytes}, {from, from + bytes}});
}

}  // extern "C"
