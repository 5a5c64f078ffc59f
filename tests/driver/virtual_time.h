// Virtual time for the double of the driver.
//
// The program has one clock. Each call of the driver costs the time of its figure, and a call that waits for work goes
// on at that work's end. A task of a stream begins when the task before it has ended, when it has been issued, when the
// events that it waits for have passed, and when its engine is free. Of tasks that could begin the earliest does. Each
// device has three engines: kernels, copies out (to the host) and copies in.
//
// Threads: those that have launched a kernel, and the first one of the process, share the program's clock, since
// torch's threads wait for each other. Any other thread (memmgr's, that lock pages) has a clock of its own, which is
// never behind the program's.
//
// Figures, by name; without a figure the cost is 0:
//   cu...            seconds of the call (without _v2); `timed_record` on top for an event with times
//   launch           seconds of a launch, for cuLaunchHostFunc and cuLaunchKernel
//   page_busy        factor on page calls while kernels run
//   op               seconds of an op of torch in addition to its launch
//   kernel           seconds that a kernel takes at least
//   memory           bytes a second of the device's memory
//   flops.DTYPE      operations a second
//   out, in          bytes a second of the link; copy_latency: seconds on top
//   first_copy       factor on the time of the first copy of a MiB or more, each way: it wakes the link
//   pageable_out, pageable_in    the same of pageable memory
//   host_alloc, host_register    seconds a byte
//
// Known limitations: kernels of different streams run one after the other; kernels and copies do not slow each other.
// Computing on the host takes no virtual time, memmgr's own code included. A program that waits for another thread, not
// for work, does not take over that thread's clock.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace virtual_time {

enum Engine { kNone = 0, kCompute = 1, kOut = 2, kIn = 3, kHost = 4, kHostWaits = 5 };
// Why a task did not begin earlier.
enum Bound { kByHost = 0, kByWait = 1, kByStream = 2, kByEngine = 3 };
constexpr double kUnknown = -1;
constexpr uint64_t kWakingBytes = uint64_t{1} << 20;
constexpr uint64_t kSolidBytes = 4096;  // copies and kernels of so few bytes are made in hollow mode, too

struct Cost {
  Engine engine = kNone;
  double seconds = 0;
  double host_seconds = 0;  // beside the call's own
  uint64_t bytes = 0;
  int label = 0;
};

struct HostClock {
  bool program = getpid() == gettid();
  double now = 0;  // of a thread that is not the program's
};

struct Row {
  Engine engine;
  int label;
  double begin, end, issued;
  Bound bound;
  int waited_for;  // label
  uint64_t bytes;
};

struct Time {
  double now = 0;                      // the program's
  std::atomic<uint64_t> published{0};  // the same in nanoseconds
  std::map<std::string, double> figures;
  bool tracing = false;
  std::vector<Row> rows;
  std::vector<std::string> labels{""};

  void Reset() {
    now = 0;
    published = 0;
    std::fill(&engines_[0][0], &engines_[0][0] + kMostDevices * 4, 0.0);
    std::fill(std::begin(woken_), std::end(woken_), false);
  }

  double Figure(const std::string& name) const {
    const auto at = figures.find(name);
    return at != figures.end() ? at->second : 0;
  }

  int Label(const std::string& name) {
    const auto [at, fresh] = numbers_.try_emplace(name, static_cast<int>(labels.size()));
    if (fresh) labels.push_back(name);
    return at->second;
  }

  // When it is free; nullptr: the work needs none.
  double* Engine(int device, enum Engine engine) {
    return engine >= kCompute && engine <= kIn ? &engines_[device][engine] : nullptr;
  }

  double Now(const HostClock& host) const { return host.program ? now : std::max(now, host.now); }

  void Spend(HostClock* host, double seconds, int label) {
    if (seconds <= 0) return;
    const double begin = Now(*host);
    Set(host, begin + seconds);
    if (host->program) Note({kHost, label, begin, begin + seconds, begin, kByHost, 0, 0});
  }
  void Spend(HostClock* host, double seconds, const std::string& name) { Spend(host, seconds, Label(name)); }

  // The thread has waited until then.
  void Reach(HostClock* host, double until, const char* name) {
    const double begin = Now(*host);
    if (until <= begin) return;
    Set(host, until);
    if (host->program) Note({kHostWaits, Label(name), begin, until, begin, kByHost, 0, 0});
  }

  void Note(const Row& row) {
    if (tracing) rows.push_back(row);
  }

  double OfCall(const std::string& name, int device) const {
    if (name == "cuLaunchKernel") return Figure("launch");
    const bool pages = name == "cuMemCreate" || name == "cuMemMap" || name == "cuMemSetAccess" || name == "cuMemUnmap" ||
                       name == "cuMemRelease";
    const bool busy = pages && engines_[device][kCompute] > now && figures.count("page_busy") != 0;
    return Figure(name) * (busy ? Figure("page_busy") : 1);
  }

  Cost OfKernel(uint64_t bytes, const char* name = "kernel") {
    const double rate = Figure("memory");
    return {kCompute, Figure("kernel") + (rate > 0 ? double(bytes) / rate : 0), 0, bytes, Label(name)};
  }

  Cost OfCopy(enum Engine engine, uint64_t bytes) {
    if (engine == kCompute) return OfKernel(2 * bytes, "copy on the device");
    const double rate = Figure(engine == kOut ? "out" : "in");
    const double seconds = Figure("copy_latency") + (rate > 0 ? double(bytes) / rate : 0);
    const bool wakes = bytes >= kWakingBytes && !std::exchange(woken_[engine], true) && Figure("first_copy") > 0;
    return {engine, seconds * (wakes ? Figure("first_copy") : 1), 0, bytes,
            Label(engine == kOut ? "copy out" : "copy in")};
  }

  Cost OfPageable(enum Engine engine, uint64_t bytes) {
    const double rate = Figure(engine == kOut ? "pageable_out" : "pageable_in");
    return {engine, rate > 0 ? double(bytes) / rate : 0, 0, bytes, Label("pageable copy")};
  }

  double OfLocking(const char* how, uint64_t bytes) const { return Figure(how) * double(bytes); }

 private:
  void Set(HostClock* host, double to) {
    (host->program ? now : host->now) = to;
    if (host->program) published = static_cast<uint64_t>(1e9 * to);
  }

  static constexpr int kMostDevices = 8;
  double engines_[kMostDevices][4] = {};
  bool woken_[4] = {};  // by engine, of all devices together
  std::map<std::string, int> numbers_{{"", 0}};
};

}  // namespace virtual_time
