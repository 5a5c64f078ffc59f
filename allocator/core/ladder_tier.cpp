#include "ladder_tier.h"

#include <errno.h>

#include <algorithm>
#include <memory>
#include <new>
#include <thread>
#include <utility>

namespace memmgr {

// Host memory that is free, or could be at once, so that the next write waits for no disk: a quarter of it.
constexpr uint64_t kAheadShare = 4;

LadderTier* LadderTier::Open(Device* device, uint64_t host_bytes, const std::string& folder, uint64_t file_bytes,
                             uint64_t bytes_per_second, int workers, std::string* wrong) {
  HostTier* host = HostTier::Open(device, host_bytes, wrong);
  if (host == nullptr) return nullptr;
  FileTier* file = FileTier::Open(folder, file_bytes, bytes_per_second, workers, wrong);
  if (file == nullptr) {
    host->Close();
    return nullptr;
  }
  auto* ladder = new LadderTier(host, file);
  ladder->WatchForks();
  return ladder;
}

void LadderTier::Close() {
  file_->Close();  // first: its workers read and write the other's memory
  host_->Close();
  if (forked_.load()) return;
  IgnoreForks();
  delete this;
}

LadderTier::Entry* LadderTier::Find(mm_slot id) {
  const auto found = entries_.find(id);
  return found == entries_.end() ? nullptr : &found->second;
}

// Records operations that the file's workers have ended for it.
void LadderTier::Settle(mm_slot id, Entry* entry) {
  if (entry->where != Where::kSinking && entry->where != Where::kRising) return;
  const int result = file_->Poll(entry->file);
  if (result == 0) return;
  if (entry->where == Where::kSinking) {
    if (result > 0) {
      entry->where = Where::kBoth;
      return;
    }
    file_error_ = result;
    file_->Free(entry->file);
    entry->file = -1;
    entry->where = Where::kHost;
    sinking_.erase(id);
    in_host_.insert(id);
    return;
  }
  entry->where = Where::kBoth;
  sinking_.insert(id);
  void* target = std::exchange(entry->target, nullptr);
  if (result > 0) {
    if (target != nullptr) entry->error = host_->Read(entry->host, target, Urgency::kQueued);
    return;
  }
  entry->error = result;
  host_->Free(entry->host);  // no valid bytes were read into it
  entry->host = -1;
  entry->where = Where::kFile;
  sinking_.erase(id);
}

void LadderTier::Sink(mm_slot id, Entry* entry) {
  const void* bytes = host_->Bytes(entry->host);
  const mm_slot file = bytes != nullptr ? file_->Write(bytes, entry->bytes, Urgency::kQueued) : -EIO;
  if (file < 0) {
    file_error_ = static_cast<int>(file);
    return;
  }
  entry->file = file;
  entry->where = Where::kSinking;
  in_host_.erase(id);
  sinking_.insert(id);
}

// The host's room of one that is in the file as well.
bool LadderTier::GiveRoom() {
  for (const mm_slot id : sinking_) {
    Entry* entry = Find(id);
    Settle(id, entry);
    if (entry->where == Where::kHost) return GiveRoom();  // its write has failed, and it is no longer among these
    if (entry->where != Where::kBoth || host_->Poll(entry->host) != 1) continue;
    host_->Free(entry->host);
    entry->host = -1;
    entry->where = Where::kFile;
    sinking_.erase(id);
    return true;
  }
  return false;
}

// The oldest that can go begins to.
LadderTier::Entry* LadderTier::SinkOldest() {
  if (file_error_ != 0) return nullptr;
  for (const mm_slot id : in_host_) {
    Entry* entry = Find(id);
    if (host_->Poll(entry->host) != 1) continue;
    Sink(id, entry);
    return entry->where == Where::kSinking ? entry : nullptr;
  }
  return nullptr;
}

void LadderTier::SinkAhead() {
  mm_tier_stats host{};
  host_->Stats(&host);
  uint64_t soon = host.capacity_bytes - host.used_bytes;
  for (const mm_slot id : sinking_) soon += Find(id)->bytes;
  while (soon < host.capacity_bytes / kAheadShare) {
    const Entry* entry = SinkOldest();
    if (entry == nullptr) return;
    soon += entry->bytes;
  }
}

// Waits for a step down. False: there is none to take.
bool LadderTier::MakeRoom(Hold* hold) {
  if (GiveRoom()) return true;
  mm_slot in_file = -1, in_host = -1;
  for (const auto& [id, entry] : entries_) {
    if (entry.where == Where::kSinking || entry.where == Where::kRising) {
      in_file = entry.file;
      break;
    }
    const bool helps = entry.where == Where::kBoth || (entry.where == Where::kHost && file_error_ == 0);
    if (in_host < 0 && helps && host_->Poll(entry.host) == 0) in_host = entry.host;
  }
  if (in_file < 0)
    if (const Entry* entry = SinkOldest()) in_file = entry->file;
  if (in_file < 0 && in_host < 0) return false;
  hold->unlock();
  if (in_file >= 0)
    file_->Wait(in_file);
  else
    host_->Wait(in_host);
  hold->lock();
  for (auto& [id, entry] : entries_) Settle(id, &entry);
  return true;
}

// ---- calls -----------------------------------------------------------------------------------------------------

mm_slot LadderTier::Write(const void* from, uint64_t bytes, Urgency urgency) {
  if (forked_.load()) return -ECANCELED;
  Hold hold(mutex_);
  mm_slot host;
  while ((host = host_->Write(from, bytes, urgency)) == -ENOSPC) {
    if (bytes > host_->capacity_bytes()) return -ENOSPC;  // it may have become less
    if (GiveRoom()) continue;
    if (urgency == Urgency::kQueued) {
      SinkAhead();
      return -ENOSPC;
    }
    if (MakeRoom(&hold)) continue;
    if (raising_ == 0) return -ENOSPC;
    hold.unlock();  // another thread's read has the room, and gives it to an entry soon
    std::this_thread::yield();
    hold.lock();
  }
  if (host < 0) return host;
  const mm_slot id = next_++;
  entries_[id] = {bytes, host};
  in_host_.insert(id);
  SinkAhead();
  mm_tier_stats now{};
  file_->Stats(&now);
  uint64_t used = now.used_bytes;
  host_->Stats(&now);
  used_peak_bytes_ = std::max(used_peak_bytes_, used + now.used_bytes);
  return id;
}

// Waits until a rise has ended, well or not. 0, or its error.
int LadderTier::AwaitRise(mm_slot id, Hold* hold) {
  Entry* entry = Find(id);
  if (entry == nullptr) return -EBADF;
  while (entry->where == Where::kRising) {
    const mm_slot file = entry->file;
    hold->unlock();
    file_->Wait(file);
    hold->lock();
    if ((entry = Find(id)) == nullptr) return -EBADF;
    Settle(id, entry);
  }
  return entry->error;
}

// Reads a slot that is needed now into host memory, whether or not there is room on the way. 1: it is in host memory;
// 0: it was read past that, into the block.
int LadderTier::Raise(mm_slot id, void* to, Hold* hold) {
  for (;;) {
    Entry* entry = Find(id);
    if (entry == nullptr) return -EBADF;
    if (entry->where != Where::kFile) return 1;
    const mm_slot file = entry->file;
    const uint64_t bytes = entry->bytes;
    void* room = nullptr;
    ++raising_;
    hold->unlock();  // copies of the room's former owner may be waited for
    const mm_slot host = host_->Reserve(bytes, true, &room);
    hold->lock();
    --raising_;
    if (host >= 0) {
      entry = Find(id);
      const int error = entry != nullptr ? file_->Read(file, room, Urgency::kQueued) : -EBADF;
      if (error != 0) {
        host_->Free(host);
        return error;
      }
      entry->host = host;
      entry->where = Where::kRising;
      const int risen = AwaitRise(id, hold);
      if (risen != 0) return risen;
      continue;  // another thread may have taken the room already
    }
    if (host != -ENOSPC) return static_cast<int>(host);
    if (MakeRoom(hold)) continue;
    // Neither tier has room for the other's.
    std::unique_ptr<char[]> past(new (std::nothrow) char[bytes]);
    if (past == nullptr) return -ENOMEM;
    hold->unlock();
    int error = file_->Read(file, past.get(), Urgency::kNow);
    if (error == 0) error = host_->Fill(past.get(), bytes, to);
    hold->lock();
    return error;
  }
}

int LadderTier::Read(mm_slot id, void* to, Urgency urgency) {
  if (forked_.load()) return -ECANCELED;
  Hold hold(mutex_);
  if (Find(id) == nullptr) return -EBADF;
  if (to == nullptr) return -EINVAL;
  AwaitRise(id, &hold);  // one read at a time
  Entry* entry = Find(id);
  if (entry == nullptr) return -EBADF;
  entry->error = 0;
  Settle(id, entry);
  if (entry->where == Where::kFile && urgency == Urgency::kQueued) {
    void* room = nullptr;
    mm_slot host;
    while ((host = host_->Reserve(entry->bytes, false, &room)) == -ENOSPC)
      if (!GiveRoom()) break;
    if (host < 0) {
      SinkAhead();
      return static_cast<int>(host);
    }
    const int error = file_->Read(entry->file, room, Urgency::kQueued);
    if (error != 0) {
      host_->Free(host);
      return error;
    }
    entry->host = host;
    entry->where = Where::kRising;
    entry->target = to;
    return 0;
  }
  if (entry->where == Where::kFile) {
    const int raised = Raise(id, to, &hold);
    if (raised <= 0) return raised;
    if ((entry = Find(id)) == nullptr) return -EBADF;
  }
  return host_->Read(entry->host, to, urgency);
}

int LadderTier::Poll(mm_slot id) {
  if (forked_.load()) return -ECANCELED;
  Hold hold(mutex_);
  Entry* entry = Find(id);
  if (entry == nullptr) return -EBADF;
  Settle(id, entry);
  if (entry->where == Where::kRising) return 0;
  if (entry->error != 0) return entry->error;
  return entry->host >= 0 ? host_->Poll(entry->host) : 1;
}

int LadderTier::Wait(mm_slot id) {
  if (forked_.load()) return -ECANCELED;
  Hold hold(mutex_);
  const int error = AwaitRise(id, &hold);
  if (error != 0) return error;
  const mm_slot host = Find(id)->host;
  hold.unlock();
  return host >= 0 ? std::min(0, host_->Wait(host)) : 0;
}

int LadderTier::Use(mm_slot id, mm_stream stream) {
  if (forked_.load()) return -ECANCELED;
  Hold hold(mutex_);
  const int error = AwaitRise(id, &hold);
  if (error != 0) return error;
  const Entry* entry = Find(id);
  return entry->host >= 0 ? host_->Use(entry->host, stream) : 0;  // in the file alone: nothing was under way
}

void LadderTier::Free(mm_slot id) {
  if (forked_.load()) return;
  Hold hold(mutex_);
  const auto found = entries_.find(id);
  if (found == entries_.end()) return;
  const Entry entry = found->second;
  entries_.erase(found);
  in_host_.erase(id);
  sinking_.erase(id);
  if (entry.file >= 0) {
    file_->Free(entry.file);  // first: its workers may be reading or filling the host's room
    file_error_ = 0;
  }
  if (entry.host >= 0) host_->Free(entry.host);
}

void LadderTier::Stats(mm_tier_stats* out) {
  *out = {};
  if (forked_.load()) return;
  Hold hold(mutex_);
  host_->Stats(out);
  mm_tier_stats file{};
  file_->Stats(&file);
  out->capacity_bytes = file.capacity_bytes == 0 ? 0 : out->capacity_bytes + file.capacity_bytes;
  out->used_bytes += file.used_bytes;
  out->used_peak_bytes = std::max(used_peak_bytes_, out->used_bytes);
  out->file_bytes = file.file_bytes;
  out->errors += file.errors;
  out->direct = file.direct;
}

void LadderTier::Inject(int write_errno, int after_writes, int read_errno, int after_reads) {
  if (forked_.load()) return;
  file_->Inject(write_errno, after_writes, read_errno, after_reads);
}

}  // namespace memmgr
