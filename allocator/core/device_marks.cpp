// Marks: which work a stream waits for, and the CPU. See device.h.
#include <errno.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <utility>

#include "device.h"
#include "ordering.h"

namespace memmgr {
namespace {

constexpr size_t kAskedMarks = 8;    // pending marks of a stream, from which on its oldest is queried
constexpr size_t kMostMarks = 1024;  // of these every second one is given up: a later one does as well

// See device.h: the number of the newest mark.
std::atomic<uint64_t> the_clock{1};
thread_local bool deferring = false;

}  // namespace

const std::atomic<uint64_t>& Device::Clock() { return the_clock; }

bool Device::Defer(bool on) { return std::exchange(deferring, on); }

// A stream that shares its bit is taken for one of the program's, as are those that cannot be numbered.
size_t Device::KindOf(CUstream stream) {
  const int number = Number(stream);
  if (number < 0 || number >= kSharedBit) return 0;
  std::lock_guard hold(streams_lock_);
  for (size_t kind = 1; kind < kStreamKinds; ++kind)
    if ((of_kind_[kind] & Bit(number)) != 0) return kind;
  return 0;
}

// Under marks_lock_.
Device::Marks* Device::MarksOf(int number) {
  while (marks_.size() <= static_cast<size_t>(number)) marks_.emplace_back();
  return &marks_[static_cast<size_t>(number)];
}

// Under marks_lock_. Those of copies are ended by their tier.
void Device::ForgetPassedMarks(Marks* marks) {
  if (marks->copies || marks->pending.size() < kAskedMarks) return;
  while (!marks->pending.empty() && driver_.EventQuery(marks->pending.front().event) == CUDA_SUCCESS) {
    marks->passed = marks->pending.front().number;
    ReturnEvent(marks->pending.front().event);
    marks->pending.pop_front();
  }
  if (marks->pending.size() < kMostMarks) return;
  std::deque<Marks::One> rest;
  for (size_t i = 0; i < marks->pending.size(); ++i) {
    if (i % 2 == 0)
      ReturnEvent(marks->pending[i].event);
    else
      rest.push_back(marks->pending[i]);
  }
  marks->pending = std::move(rest);
}

void Device::MarkTail(CUstream stream) {
  if (forked()) return;
  const int number = Number(stream);
  const auto context = EnsureContext();
  if (number < 0 || context.error() != CUDA_SUCCESS) return;
  const RelaxedCapture relaxed(driver_);
  CUresult error;
  if (Capturing(stream, &error) || error != CUDA_SUCCESS) return;
  std::lock_guard hold(marks_lock_);
  Marks* marks = MarksOf(number);
  ForgetPassedMarks(marks);
  CUevent event = TakeEvent();
  if (event == nullptr) return;
  // Before the event is recorded: work that another thread queues while the clock still has the old value is in front
  // of it.
  const uint64_t mark = the_clock.fetch_add(1) + 1;
  if (Noted(driver_.EventRecord(event, stream)) == CUDA_SUCCESS)
    marks->pending.push_back({mark, event});
  else
    ReturnEvent(event);
}

// The stream is one tier's, which queues under its own lock: no other work comes in between.
uint64_t Device::MarkCopy(CUstream stream, CUevent event) {
  const int number = Number(stream);
  std::lock_guard hold(marks_lock_);
  const uint64_t mark = the_clock.fetch_add(1) + 1;
  if (number < 0) return mark;
  try {
    Marks* marks = MarksOf(number);
    marks->copies = true;
    marks->pending.push_back({mark, event});
  } catch (const std::bad_alloc&) {  // the stream's tail is waited for instead
  }
  return mark;
}

void Device::MarkEnded(CUstream stream, uint64_t mark) {
  const int number = Number(stream);
  if (number < 0) return;
  std::lock_guard hold(marks_lock_);
  Marks* marks = MarksOf(number);
  while (!marks->pending.empty() && marks->pending.front().number <= mark) marks->pending.pop_front();
  marks->passed = std::max(marks->passed, mark);
}

// Puts the first mark above `time` in front of the waiter's next work.
Device::Mark Device::WaitForMark(CUstream waiter, int number, uint64_t time) {
  if (time == kTail) return Mark::kNone;
  std::lock_guard hold(marks_lock_);
  Marks* marks = MarksOf(number);
  ForgetPassedMarks(marks);
  if (marks->passed > time) return Mark::kPassed;
  const auto mark = std::upper_bound(marks->pending.begin(), marks->pending.end(), time,
                                     [](uint64_t t, const Marks::One& one) { return t < one.number; });
  if (mark == marks->pending.end()) return Mark::kNone;
  return driver_.StreamWaitEvent(waiter, mark->event, 0) == CUDA_SUCCESS ? Mark::kQueued : Mark::kNone;
}

// Covers all work of `other` that was queued at the clock's `time`.
int Device::WaitUntil(CUstream waiter, CUstream other, uint64_t time) {
  const int number = Number(other);
  const auto context = EnsureContext();
  if (number >= 0 && context.error() == CUDA_SUCCESS) {
    const RelaxedCapture relaxed(driver_);
    switch (WaitForMark(waiter, number, time)) {
      case Mark::kQueued:
        ++waits_;
        return 0;
      case Mark::kPassed:
        return 0;
      case Mark::kNone:
        break;
    }
  }
  return WaitForTail(waiter, other);
}

// The streams that could not be waited for, as their bits.
StreamMask Device::WaitFor(CUstream waiter, StreamMask touched, const StreamTimes& times) {
  try {
    if ((touched & kAnything) != 0) return Synchronize() == 0 ? 0 : touched;
    StreamMask failed = 0;
    for (CUstream other : StreamsOf(touched, waiter))
      if (WaitUntil(waiter, other, times.at[KindOf(other)]) != 0) failed |= Bit(Number(other));
    return failed;
  } catch (const std::bad_alloc&) {
    return touched;
  }
}

int Device::WaitForTouched(CUstream waiter, const void* block) {
  StreamMask touched = 0;
  StreamTimes times;
  const bool lent = IfLent(block, [&](Lent& found) {
    touched = found.touched;
    times = found.times;
    found.times.at[0] = kTail;
  });
  if (!lent) touched = arena_->TakeTouched(block, &times);
  return WaitFor(waiter, touched, times) == 0 ? 0 : -EBUSY;
}

void Device::NoteUse(const void* block, uint64_t time) {
  if (!IfLent(block, [&](Lent& lent) { lent.times.at[0] = time; })) arena_->NoteUse(block, time);
}

void Device::Settled(const void* block) {
  const auto bit_of = [&](CUstream home) {
    const int number = Number(home);
    return number < 0 ? kAnything : Bit(number);
  };
  if (IfLent(block, [&](Lent& lent) { lent.touched = bit_of(lent.home); })) return;
  const int64_t home = arena_->Home(block);
  if (home >= 0) arena_->Settled(block, Bit(static_cast<int>(home)));
}

int Device::Synchronize() {
  if (forked()) return -ECANCELED;
  std::lock_guard hold(settling_);
  const auto context = EnsureContext();
  if (context.error() != CUDA_SUCCESS) return DriverErrno(Noted(context.error()));
  arena_->BeginSettling();
  const int error = Order<"synchronize.all">([&] { return SynchronizeContext(); });
  if (error == 0) arena_->EndSettling();
  return error;
}

int Device::Settle(StreamMask touched, const StreamTimes& times) {
  try {
    return Order<"trim.touched">([&] { return SynchronizeAll(touched, times); });
  } catch (const std::bad_alloc&) {
    return -ENOMEM;
  }
}

// For marks a stream of memmgr's waits, and the CPU waits for that stream: a mark's event may be reused in between.
int Device::SynchronizeAll(StreamMask touched, const StreamTimes& times) {
  if ((touched & kAnything) != 0) return Synchronize();
  const auto context = EnsureContext();
  if (context.error() != CUDA_SUCCESS) return DriverErrno(Noted(context.error()));
  const RelaxedCapture relaxed(driver_);
  CUstream settler = settler_stream_.load();
  if (settler == nullptr && times.at != StreamTimes{{kTail, kTail, kTail}}.at) {
    CUresult error;
    settler = MakeStream(&error);  // without one whole streams are waited for
    settler_stream_.store(settler);
  }
  bool by_marks = false;
  for (CUstream stream : StreamsOf(touched, reinterpret_cast<CUstream>(-1))) {
    CUresult error = CUDA_SUCCESS;
    const int number = Number(stream);
    if (number >= 0 && settler != nullptr) {
      const Mark found = WaitForMark(settler, number, times.at[KindOf(stream)]);
      by_marks |= found == Mark::kQueued;
      if (found != Mark::kNone) continue;
    }
    if (Capturing(stream, &error)) return -EBUSY;
    ++synchronizations_;
    if (error == CUDA_SUCCESS) error = driver_.StreamSynchronize(stream);
    if (Noted(error) != CUDA_SUCCESS) return Synchronize();  // It waits for all streams.
  }
  if (!by_marks || driver_.StreamQuery(settler) == CUDA_SUCCESS) return 0;
  ++synchronizations_;
  if (Noted(driver_.StreamSynchronize(settler)) == CUDA_SUCCESS) return 0;
  return SynchronizeContext();
}

}  // namespace memmgr
