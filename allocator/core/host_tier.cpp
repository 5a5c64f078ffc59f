// Longer than most files here: one state machine under one lock, and a tier below calls into it.
#include "host_tier.h"

#include <errno.h>

#include <algorithm>
#include <utility>

#include "ordering.h"

namespace memmgr {
namespace {

constexpr uint64_t kGrain = 512;

uint64_t RoundUp(uint64_t bytes) { return (bytes + kGrain - 1) & ~(kGrain - 1); }

// The device answers with the driver's error, or a negative errno of its own.
int Errno(int error) { return error > 0 ? DriverErrno(error) : error; }

// The device's context for the calling thread, and permission for calls that another thread's capture would forbid: it
// has nothing to do with these copies.
class InDriver {
 public:
  explicit InDriver(Device* device) : context_(device->driver(), device->ordinal()), relaxed_(device->driver()) {}
  int error() const { return DriverErrno(context_.error()); }

 private:
  EnsureContext context_;
  RelaxedCapture relaxed_;
};

}  // namespace

// ---- life ------------------------------------------------------------------------------------------------------

HostTier::HostTier(Device* device, uint64_t capacity_bytes)
    : device_(device), slab_(device->driver(), device->ordinal(), capacity_bytes) {}

HostTier* HostTier::Open(Device* device, uint64_t capacity_bytes, std::string* wrong) {
  const mm_driver& driver = device->driver();
  const uint64_t capacity = capacity_bytes & ~(kGrain - 1);
  if (capacity == 0) {
    *wrong = "a host tier needs a capacity of at least 512 bytes";
    return nullptr;
  }
  const InDriver in(device);
  std::unique_ptr<HostTier, void (*)(HostTier*)> tier(new HostTier(device, capacity), [](HostTier* t) { delete t; });
  if (!tier->slab_.Open(wrong)) return nullptr;
  CUresult error = CUDA_SUCCESS;
  for (Link& link : tier->links_) {
    link.stream = device->MakeStream(&error);
    if (link.stream != nullptr) continue;
    *wrong = "cannot make a stream for copies: " + DriverText(driver, error);
    if (tier->links_[kWrite].stream != nullptr) device->GiveStream(tier->links_[kWrite].stream);
    return nullptr;
  }
  tier->slab_.Start({tier->links_[kWrite].stream, tier->links_[kRead].stream});
  tier->WatchForks();
  return tier.release();
}

void HostTier::Close() {
  // In a forked child the driver does not answer, and the thread that had the lock does not exist: nothing is done.
  if (forked_.load()) return;
  IgnoreForks();
  const InDriver in(device_);
  slab_.Stop();
  Order<"close.writes">([&] { return driver().StreamSynchronize(links_[kWrite].stream); });
  Order<"close.reads">([&] { return driver().StreamSynchronize(links_[kRead].stream); });
  for (Link& link : links_) {
    for (const OperationRef& operation : link.under_way) {
      device_->MarkEnded(link.stream, operation->mark);
      events_.push_back(operation->begin);
      events_.push_back(operation->end);
    }
    device_->GiveStream(link.stream);
  }
  for (CUevent event : events_) driver().EventDestroy(event);
  delete this;
}

// ---- operations ------------------------------------------------------------------------------------------------

int HostTier::TakeEvent(CUevent* event) {
  if (!events_.empty()) {
    *event = events_.back();
    events_.pop_back();
    return 0;
  }
  return DriverErrno(driver().EventCreate(event, CU_EVENT_DEFAULT));
}

CUresult HostTier::Copy(Direction direction, const Slot& slot, void* block) {
  const auto on_device = reinterpret_cast<CUdeviceptr>(block);
  return direction == kWrite
             ? driver().MemcpyDtoHAsync(slab_.At(slot.offset), on_device, slot.bytes, links_[kWrite].stream)
             : driver().MemcpyHtoDAsync(on_device, slab_.At(slot.offset), slot.bytes, links_[kRead].stream);
}

// The copy between its two events, after the work that the caller made the stream wait for. After an error no copy is
// queued.
int HostTier::Queue(Direction direction, const Slot& slot, void* block, int error_later, OperationRef* out) {
  Link& link = links_[direction];
  auto operation = std::make_shared<Operation>();
  operation->direction = direction;
  operation->bytes = slot.bytes;
  operation->block = block;
  operation->error = error_later;
  // All memory of memmgr's own is allocated before the first call of the driver.
  events_.reserve(events_.size() + 2 * (links_[0].under_way.size() + links_[1].under_way.size() + 1));
  link.blocks[block] = operation;
  link.under_way.push_back(operation);

  int error = TakeEvent(&operation->begin);
  if (error == 0) error = TakeEvent(&operation->end);
  if (error == 0) error = DriverErrno(driver().EventRecord(operation->begin, link.stream));
  if (error == 0) {
    error = DriverErrno(Copy(direction, slot, block));
    if (error == 0) {
      error = DriverErrno(driver().EventRecord(operation->end, link.stream));
      // The copy runs, and nothing marks its end: it must not outlive this call.
      if (error != 0) driver().StreamSynchronize(link.stream);
    }
  }
  if (error != 0) {
    ++stats_.errors;
    link.under_way.pop_back();
    link.blocks.erase(block);
    for (CUevent event : {operation->begin, operation->end}) {
      if (event != nullptr) events_.push_back(event);
    }
    return error;
  }
  operation->mark = device_->MarkCopy(link.stream, operation->end);
  operation->number = link.begun++;
  (direction == kWrite ? stats_.queued_write_bytes : stats_.queued_read_bytes) += slot.bytes;
  *out = std::move(operation);
  return 0;
}

int HostTier::WaitFor(CUstream waiter, const Operation* operation) {
  if (operation == nullptr || operation->done) return 0;
  return DriverErrno(driver().StreamWaitEvent(waiter, operation->end, 0));
}

// Records the operations that have ended. Operations of one stream end in order, so only the oldest is queried.
void HostTier::PollLink(Direction direction) {
  Link* link = &links_[direction];
  while (!link->under_way.empty()) {
    const CUresult result = driver().EventQuery(link->under_way.front()->end);
    if (result == CUDA_ERROR_NOT_READY) break;
    Finish(link, result);
  }
}

// Asks the driver about the oldest operation of one way, and records it if it has ended. The two ways take turns.
// False: it has not, or there is none.
bool HostTier::AskOnce() {
  asked_ = asked_ == kRead ? kWrite : kRead;
  Link* link = &links_[asked_];
  if (link->under_way.empty()) link = &links_[asked_ == kRead ? kWrite : kRead];
  if (link->under_way.empty()) return false;
  const CUresult result = driver().EventQuery(link->under_way.front()->end);
  if (result == CUDA_ERROR_NOT_READY) return false;
  Finish(link, result);
  return true;
}

void HostTier::Finish(Link* link, CUresult result) {
  const OperationRef operation = std::move(link->under_way.front());
  link->under_way.pop_front();
  ++link->done;
  float milliseconds = 0;
  if (result == CUDA_SUCCESS) {
    driver().EventElapsedTime(&milliseconds, operation->begin, operation->end);
  } else {
    operation->error = DriverErrno(result);
  }
  device_->MarkEnded(link->stream, operation->mark);
  events_.push_back(std::exchange(operation->begin, nullptr));
  events_.push_back(std::exchange(operation->end, nullptr));
  operation->done = true;
  const auto newest = link->blocks.find(operation->block);
  if (newest != link->blocks.end() && newest->second == operation) {
    link->blocks.erase(newest);
    if (result == CUDA_SUCCESS) device_->Untouch(operation->block, link->stream, operation->mark);
  }
  const bool write = operation->direction == kWrite;
  (write ? stats_.queued_write_bytes : stats_.queued_read_bytes) -= operation->bytes;
  if (operation->error != 0) {
    ++stats_.errors;
    return;
  }
  ++(write ? stats_.writes : stats_.reads);
  (write ? stats_.written_bytes : stats_.read_bytes) += operation->bytes;
  (write ? stats_.write_nanoseconds : stats_.read_nanoseconds) += static_cast<uint64_t>(milliseconds * 1e6);
}

// The CPU waits, without the lock. If another thread notes the end in between and the event is reused, this waits for a
// later copy: too long, but never too short.
int HostTier::Synchronize(OperationRef operation, Hold* hold) {
  while (!operation->done) {
    const CUevent end = operation->end;
    hold->unlock();
    const CUresult result = driver().EventSynchronize(end);
    hold->lock();
    Link& link = links_[operation->direction];
    while (!operation->done) {
      const Operation* oldest = link.under_way.front().get();  // earlier work on the stream has ended too
      Finish(&link, oldest == operation.get() ? result : driver().EventQuery(oldest->end));
    }
  }
  return operation->error;
}

int HostTier::InjectedError(Direction direction) {
  Link& link = links_[direction];
  if (link.inject_error == 0 || --link.inject_after > 0) return 0;
  return -std::exchange(link.inject_error, 0);
}

// ---- slots -----------------------------------------------------------------------------------------------------

mm_slot HostTier::IdOf(const Slot* slot) const {
  return static_cast<mm_slot>(slot->generation) << 32 | static_cast<mm_slot>(slot->index);
}

HostTier::Slot* HostTier::Find(mm_slot id) {
  const auto index = static_cast<uint64_t>(id) & UINT32_MAX;
  if (id < 0 || index >= slots_.size()) return nullptr;
  Slot* slot = &slots_[index];
  return slot->held && IdOf(slot) == id ? slot : nullptr;
}

// Waits, without the lock, if more has to be page-locked first, or returns -EAGAIN. -ENOSPC: there is no room.
int HostTier::TakeSlot(uint64_t bytes, bool wait, Hold* hold, Slot** out) {
  const uint64_t room = RoundUp(bytes);
  uint64_t offset, ticket = 0;
  for (;;) {
    if (unused_.empty()) {
      unused_.reserve(slots_.size() + 1);  // giving back must not throw
      slots_.emplace_back();
      slots_.back().index = static_cast<uint32_t>(slots_.size() - 1);
      unused_.push_back(&slots_.back());
    }
    offset = slab_.Take(room, &ticket);
    if (offset == LockedMemory::kNone) return -ENOSPC;
    if (offset != LockedMemory::kSoon) break;
    if (!wait) return -EAGAIN;
    hold->unlock();
    slab_.Await(ticket);
    hold->lock();
  }
  Slot* slot = unused_.back();
  unused_.pop_back();
  slot->held = true;
  slot->offset = offset;
  slot->room_bytes = room;
  slot->bytes = bytes;
  stats_.used_bytes += room;
  stats_.used_peak_bytes = std::max(stats_.used_peak_bytes, stats_.used_bytes);
  *out = slot;
  return 0;
}

void HostTier::GiveSlot(Slot* slot) {
  slot->held = false;
  slot->generation = (slot->generation + 1) & INT32_MAX;
  slot->write = nullptr;
  slot->read = nullptr;
  stats_.used_bytes -= slot->room_bytes;
  unused_.push_back(slot);
  slab_.Give(slot->offset, slot->room_bytes);
}

// The write stream waits for reads from the slots that this room belonged to before.
int HostTier::WaitForFormerReaders(uint64_t begin, uint64_t end) {
  const Operation* last = nullptr;
  for (const Fence& fence : fences_) {
    const Operation* read = fence.operation.get();
    if (read->direction != kRead || read->number < waited_reads_ || fence.end <= begin || end <= fence.begin) continue;
    if (last == nullptr || read->number > last->number) last = read;
  }
  if (last == nullptr) return 0;
  const int error = Order<"offload.slot_reuse">([&] { return WaitFor(links_[kWrite].stream, last); });
  if (error != 0) return error;
  // All reads are on one stream and all writes on another: having waited for this read, this write and all later ones
  // are behind the reads up to it, wherever in the slab they were.
  waited_reads_ = last->number + 1;
  return 0;
}

// ---- calls -----------------------------------------------------------------------------------------------------

mm_slot HostTier::Write(const void* from, uint64_t bytes, Urgency urgency) {
  if (forked_.load()) return -ECANCELED;
  if (from == nullptr || bytes == 0) return -EINVAL;
  if (bytes > slab_.capacity_bytes()) return -ENOSPC;
  const InDriver in(device_);
  if (in.error() != 0) return in.error();
  Hold hold(mutex_);
  AskOnce();
  const int injected = InjectedError(kWrite);
  if (injected != 0 && urgency == Urgency::kNow) return injected;
  Slot* slot = nullptr;
  int error = TakeSlot(bytes, true, &hold, &slot);
  if (error != 0) return error;
  const CUstream stream = links_[kWrite].stream;
  error = WaitForFormerReaders(slot->offset, slot->offset + slot->room_bytes);
  if (error == 0) error = Errno(Order<"offload.touched">([&] { return device_->WaitForTouched(stream, from); }));
  if (error == 0) {
    Order<"offload.source">([&] { device_->Touch(from, stream); });
    error = Queue(kWrite, *slot, const_cast<void*>(from), injected, &slot->write);
  }
  if (error == 0) return IdOf(slot);
  GiveSlot(slot);
  return error;
}

int HostTier::Read(mm_slot id, void* to, Urgency urgency) {
  if (forked_.load()) return -ECANCELED;
  if (to == nullptr) return -EINVAL;
  const InDriver in(device_);
  if (in.error() != 0) return in.error();
  {
    Hold hold(mutex_);
    Slot* slot = Find(id);
    if (slot == nullptr) return -EBADF;
    if (!slot->write->done) PollLink(kWrite);  // a write that has failed leaves nothing to read
    if (slot->write->done && slot->write->error != 0) return slot->write->error;
    const int injected = InjectedError(kRead);
    if (injected != 0 && urgency == Urgency::kNow) return injected;
    const CUstream stream = links_[kRead].stream;
    int error = Errno(Order<"reload.target">([&] { return device_->WaitForTouched(stream, to); }));
    if (error == 0) error = Order<"reload.write_done">([&] { return WaitFor(stream, slot->write.get()); });
    if (error != 0) return error;
    device_->Settled(to);
    Order<"reload.filling">([&] { device_->Touch(to, stream); });
    OperationRef read;
    error = Queue(kRead, *slot, to, injected, &read);
    if (error != 0) return error;
    slot->read = std::move(read);
  }
  return urgency == Urgency::kNow ? Use(id, device_->Home(to)) : 0;
}

int HostTier::Use(mm_slot id, mm_stream stream) {
  if (forked_.load()) return -ECANCELED;
  const InDriver in(device_);
  if (in.error() != 0) return in.error();
  Hold hold(mutex_);
  Slot* slot = Find(id);
  if (slot == nullptr) return -EBADF;
  if (slot->read == nullptr) {
    return Order<"use.write">([&] { return WaitFor(stream, slot->write.get()); });
  }
  Operation* read = slot->read.get();
  if (read->done) return read->error;
  const int error = Order<"use.read">([&] { return WaitFor(stream, read); });
  if (error != 0) return error;
  // Memory that is reused in the order of this stream is now behind the copy. Without this its next owner would wait
  // for all reads that were queued later.
  Link& link = links_[kRead];
  const auto newest = link.blocks.find(read->block);
  if (newest != link.blocks.end() && newest->second.get() == read && device_->Home(read->block) == stream) {
    device_->Untouch(read->block, link.stream, read->mark);
    link.blocks.erase(newest);
  }
  return 0;
}

int HostTier::Known(mm_slot id) {
  if (forked_.load()) return -ECANCELED;
  Hold hold(mutex_);
  const Slot* slot = Find(id);
  if (slot == nullptr) return -EBADF;
  const Operation* last = slot->read != nullptr ? slot->read.get() : slot->write.get();
  if (slot->write->done && last->done) return last->error != 0 ? last->error : 1;
  return 0;
}

int HostTier::Poll(mm_slot id) {
  if (const int known = Known(id)) return known;
  {
    const InDriver in(device_);
    Hold hold(mutex_);
    PollLinks();
  }
  return Known(id);
}

uint64_t HostTier::Ended() {
  if (forked_.load()) return 0;
  Hold hold(mutex_);
  if (!links_[kWrite].under_way.empty() || !links_[kRead].under_way.empty()) {
    const InDriver in(device_);
    while (AskOnce()) {
    }
  }
  return links_[kWrite].done + links_[kRead].done;
}

int HostTier::Wait(mm_slot id) {
  if (forked_.load()) return -ECANCELED;
  const InDriver in(device_);
  Hold hold(mutex_);
  const Slot* slot = Find(id);
  if (slot == nullptr) return -EBADF;
  const OperationRef write = slot->write;
  const OperationRef read = slot->read;
  const int error = Order<"wait.write">([&] { return Synchronize(write, &hold); });
  return read == nullptr ? error : Order<"wait.read">([&] { return Synchronize(read, &hold); });
}

const void* HostTier::Bytes(mm_slot id) {
  if (forked_.load()) return nullptr;
  const InDriver in(device_);
  Hold hold(mutex_);
  const Slot* slot = Find(id);
  if (slot == nullptr) return nullptr;
  const char* const bytes = slab_.At(slot->offset);
  const OperationRef write = slot->write;
  return Order<"bytes.write">([&] { return Synchronize(write, &hold); }) == 0 ? bytes : nullptr;
}

void HostTier::Free(mm_slot id) {
  if (forked_.load()) return;
  const InDriver in(device_);
  Hold hold(mutex_);
  AskOnce();
  std::erase_if(fences_, [](const Fence& fence) { return fence.operation->done; });
  Slot* slot = Find(id);
  if (slot == nullptr) return;
  // The next write into this room comes after the last one, on the same stream. The CPU does not wait.
  for (const OperationRef& operation : {slot->write, slot->read})
    if (operation != nullptr && !operation->done)
      fences_.push_back({slot->offset, slot->offset + slot->room_bytes, operation});
  GiveSlot(slot);
}

mm_slot HostTier::Reserve(uint64_t bytes, bool wait, void** room) {
  if (forked_.load()) return -ECANCELED;
  if (bytes > slab_.capacity_bytes()) return -ENOSPC;
  const InDriver in(device_);
  if (in.error() != 0) return in.error();
  Hold hold(mutex_);
  PollLinks();
  Slot* slot = nullptr;
  if (const int error = TakeSlot(bytes, wait, &hold, &slot); error != 0) return error;
  const mm_slot id = IdOf(slot);
  std::vector<OperationRef> before;
  for (const Fence& fence : fences_) {
    const bool meets = fence.begin < slot->offset + slot->room_bytes && slot->offset < fence.end;
    if (meets && !fence.operation->done) before.push_back(fence.operation);
  }
  if (!before.empty() && !wait) {
    GiveSlot(slot);
    return -EAGAIN;
  }
  slot->write = std::make_shared<Operation>();
  slot->write->done = true;
  *room = slab_.At(slot->offset);
  for (const OperationRef& operation : before)  // whether it went well is no concern of this slot
    Order<"reserve.slot_reuse">([&] { return Synchronize(operation, &hold); });
  return id;
}

int HostTier::Fill(const void* from, uint64_t bytes, void* to) {
  if (forked_.load()) return -ECANCELED;
  const InDriver in(device_);
  if (in.error() != 0) return in.error();
  Hold hold(mutex_);
  const CUstream stream = links_[kRead].stream;
  int error = Errno(Order<"fill.target">([&] { return device_->WaitForTouched(stream, to); }));
  if (error == 0) error = DriverErrno(driver().MemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(to), from, bytes, stream));
  const int done = Order<"fill.done">([&] { return DriverErrno(driver().StreamSynchronize(stream)); });
  return error != 0 ? error : done;
}

void HostTier::Stats(mm_tier_stats* out) {
  *out = {};
  if (forked_.load()) return;
  const InDriver in(device_);
  Hold hold(mutex_);
  PollLinks();
  *out = stats_;
  out->capacity_bytes = slab_.capacity_bytes();
  out->lock_nanoseconds = slab_.lock_nanoseconds();
  out->lock_wait_nanoseconds = slab_.lock_wait_nanoseconds();
}

void HostTier::Inject(int write_errno, int after_writes, int read_errno, int after_reads) {
  if (forked_.load()) return;
  Hold hold(mutex_);
  links_[kWrite].inject_error = write_errno;
  links_[kWrite].inject_after = after_writes;
  links_[kRead].inject_error = read_errno;
  links_[kRead].inject_after = after_reads;
}

}  // namespace memmgr
