#include "block_index.h"

#include <bit>

namespace memmgr {

// ---- BlockPool -------------------------------------------------------------------------------------------------

void BlockPool::Reserve() {
  if (recycled_ != nullptr && recycled_->next != nullptr) return;
  slabs_.push_back(std::make_unique<Block[]>(kSlab));
  Block* slab = slabs_.back().get();
  for (size_t i = 0; i < kSlab; ++i) {
    slab[i].next = recycled_;
    recycled_ = &slab[i];
  }
}

Block* BlockPool::Take() {
  if (recycled_ == nullptr) Reserve();
  Block* block = recycled_;
  recycled_ = block->next;
  *block = Block{};
  return block;
}

void BlockPool::Return(Block* block) {
  block->next = recycled_;
  recycled_ = block;
}

// ---- BlockTable ------------------------------------------------------------------------------------------------

BlockTable::BlockTable() : entries_(1024), mask_(1023), shift_(64 - 10) {}

void BlockTable::ReserveOne() {
  if (2 * (size_ + 1) <= entries_.size()) return;
  std::vector<Entry> old(entries_.size() * 2);
  old.swap(entries_);
  mask_ = entries_.size() - 1;
  --shift_;
  for (const Entry& entry : old) {
    if (entry.block != nullptr) Place(entry.block);
  }
}

void BlockTable::Place(Block* block) {
  uint64_t at = Home(block->offset);
  while (entries_[at].block != nullptr) at = (at + 1) & mask_;
  entries_[at] = {block->offset, block};
}

void BlockTable::Insert(Block* block) {
  Place(block);
  ++size_;
}

Block* BlockTable::Find(uint64_t offset) const {
  for (uint64_t at = Home(offset); entries_[at].block != nullptr; at = (at + 1) & mask_) {
    if (entries_[at].offset == offset) return entries_[at].block;
  }
  return nullptr;
}

void BlockTable::Erase(uint64_t offset) {
  uint64_t hole = Home(offset);
  while (entries_[hole].offset != offset || entries_[hole].block == nullptr) hole = (hole + 1) & mask_;
  // An entry may move into the hole only if its home does not lie cyclically in (hole, at]: it would become unfindable.
  for (uint64_t at = (hole + 1) & mask_; entries_[at].block != nullptr; at = (at + 1) & mask_) {
    const uint64_t home = Home(entries_[at].offset);
    if (((at - home) & mask_) >= ((at - hole) & mask_)) {
      entries_[hole] = entries_[at];
      hole = at;
    }
  }
  entries_[hole].block = nullptr;
  --size_;
}

// ---- RunIndex --------------------------------------------------------------------------------------------------

int RunIndex::BinOf(uint64_t bytes) const {
  const uint64_t units = bytes >> unit_shift_;
  if (units < 16) return static_cast<int>(units);
  const int exponent = std::bit_width(units) - 1;
  return 16 + (exponent - 4) * 8 + static_cast<int>((units >> (exponent - 3)) & 7);
}

int RunIndex::NextBin(int bin) const {
  int word = bin / 64;
  if (word >= kWords) return -1;
  uint64_t bits = occupied_[word] & (~uint64_t{0} << (bin % 64));
  while (bits == 0) {
    if (++word == kWords) return -1;
    bits = occupied_[word];
  }
  return word * 64 + std::countr_zero(bits);
}

int RunIndex::PreviousBin(int bin) const {
  if (bin < 0) return -1;
  int word = bin / 64;
  uint64_t bits = occupied_[word] & (~uint64_t{0} >> (63 - bin % 64));
  while (bits == 0) {
    if (--word < 0) return -1;
    bits = occupied_[word];
  }
  return word * 64 + 63 - std::countl_zero(bits);
}

void RunIndex::Insert(Block* run) {
  const int bin = BinOf(run->bytes);
  // Unrelated to the order of the key is all that a priority has to be.
  run->priority = static_cast<uint16_t>((run->offset * 0x9E3779B97F4A7C15ull) >> 48);
  Block** link = &roots_[bin];
  while (*link != nullptr && (*link)->priority >= run->priority) {
    link = FitsTighter(*link, run) ? &(*link)->right : &(*link)->left;
  }
  // The old subtree becomes a child of the new node: split it by the key.
  Block* below = *link;
  *link = run;
  Block** smaller = &run->left;
  Block** larger = &run->right;
  while (below != nullptr) {
    if (FitsTighter(below, run)) {
      *smaller = below;
      smaller = &below->right;
      below = below->right;
    } else {
      *larger = below;
      larger = &below->left;
      below = below->left;
    }
  }
  *smaller = nullptr;
  *larger = nullptr;
  occupied_[bin / 64] |= uint64_t{1} << (bin % 64);
  ++size_;
}

void RunIndex::Erase(Block* run) {
  const int bin = BinOf(run->bytes);
  Block** link = &roots_[bin];
  while (*link != run) link = FitsTighter(*link, run) ? &(*link)->right : &(*link)->left;
  Block* smaller = run->left;
  Block* larger = run->right;
  while (smaller != nullptr && larger != nullptr) {
    if (smaller->priority > larger->priority) {
      *link = smaller;
      link = &smaller->right;
      smaller = smaller->right;
    } else {
      *link = larger;
      link = &larger->left;
      larger = larger->left;
    }
  }
  *link = smaller != nullptr ? smaller : larger;
  if (roots_[bin] == nullptr) occupied_[bin / 64] &= ~(uint64_t{1} << (bin % 64));
  --size_;
}

Block* RunIndex::BestFit(uint64_t bytes, uint64_t offset) const {
  if (size_ == 0) return nullptr;
  // Every run of a higher bin is long enough; of this bin only some are.
  const int bin = BinOf(bytes);
  Block* best = nullptr;
  for (Block* at = roots_[bin]; at != nullptr;) {
    if (at->bytes > bytes || (at->bytes == bytes && at->offset >= offset)) {
      best = at;
      at = at->left;
    } else {
      at = at->right;
    }
  }
  if (best != nullptr) return best;
  const int higher = NextBin(bin + 1);
  if (higher < 0) return nullptr;
  best = roots_[higher];
  while (best->left != nullptr) best = best->left;
  return best;
}

Block* RunIndex::Below(uint64_t bytes, uint64_t offset) const {
  const int bin = BinOf(bytes);
  Block* best = nullptr;
  for (Block* at = roots_[bin]; at != nullptr;) {
    if (at->bytes < bytes || (at->bytes == bytes && at->offset < offset)) {
      best = at;
      at = at->right;
    } else {
      at = at->left;
    }
  }
  if (best != nullptr) return best;
  const int lower = PreviousBin(bin - 1);
  if (lower < 0) return nullptr;
  best = roots_[lower];
  while (best->right != nullptr) best = best->right;
  return best;
}

Block* RunIndex::Largest(const Block* except) const {
  for (int word = kWords - 1; word >= 0; --word) {
    for (uint64_t bits = occupied_[word]; bits != 0;) {
      const int bit = 63 - std::countl_zero(bits);
      Block* best = nullptr;
      for (Block* at = roots_[word * 64 + bit]; at != nullptr;) {
        if (at != except) best = at;
        at = at == except && at->right == nullptr ? at->left : at->right;
      }
      if (best != nullptr) return best;
      bits &= ~(uint64_t{1} << bit);
    }
  }
  return nullptr;
}

}  // namespace memmgr
