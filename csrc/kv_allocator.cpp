#include "kv_allocator.h"

#include <algorithm>
#include <bit>

namespace kvcached {

namespace {

constexpr uint32_t kWordBits = 64;

uint64_t bit(uint64_t position) { return uint64_t{1} << (position % kWordBits); }

Status broken(const std::string& what) {
  return failure(Code::internal, "KV allocator integrity: " + what + " does not add up");
}

}  // namespace

KvAllocator::KvAllocator(Slab slabs, uint32_t blocks_per_slab, int64_t reserved_blocks)
    : slabs_(slabs),
      blocks_per_slab_(blocks_per_slab),
      reserved_blocks_(reserved_blocks),
      words_per_slab_((blocks_per_slab + kWordBits - 1) / kWordBits),
      unmapped_slabs_(slabs),
      owned_(words_per_slab_ * slabs, 0),
      states_(slabs, State::unmapped),
      free_(slabs, 0),
      next_(slabs, kNone),
      previous_(slabs, kNone),
      heads_(blocks_per_slab + 1, kNone),
      nonempty_(blocks_per_slab / kWordBits + 1, 0) {
  for (int64_t block = 0; block < reserved_blocks; ++block) set_owned(block, true);
}

Slab KvAllocator::floor_slabs() const {
  return static_cast<Slab>((reserved_blocks_ + blocks_per_slab_ - 1) / blocks_per_slab_);
}

void KvAllocator::set_owned(int64_t block, bool owned) {
  const auto slab = static_cast<Slab>(block / blocks_per_slab_);
  const auto position = static_cast<uint64_t>(block - first_block(slab));
  uint64_t& word = owned_[slab * words_per_slab_ + position / kWordBits];
  word = owned ? word | bit(position) : word & ~bit(position);
}

uint32_t KvAllocator::count_owned(Slab slab) const {
  uint32_t count = 0;
  for (size_t i = 0; i < words_per_slab_; ++i) {
    count += static_cast<uint32_t>(std::popcount(owned_[slab * words_per_slab_ + i]));
  }
  return count;
}

void KvAllocator::link(Slab slab) {
  const uint32_t free = free_[slab];
  if (free == 0) return;
  previous_[slab] = kNone;
  next_[slab] = heads_[free];
  if (heads_[free] != kNone) previous_[heads_[free]] = slab;
  heads_[free] = slab;
  nonempty_[free / kWordBits] |= bit(free);
}

void KvAllocator::unlink(Slab slab) {
  const uint32_t free = free_[slab];
  if (free == 0) return;
  if (next_[slab] != kNone) previous_[next_[slab]] = previous_[slab];
  if (previous_[slab] != kNone) {
    next_[previous_[slab]] = next_[slab];
    return;
  }
  heads_[free] = next_[slab];
  if (heads_[free] == kNone) nonempty_[free / kWordBits] &= ~bit(free);
}

void KvAllocator::set_free(Slab slab, uint32_t free) {
  unlink(slab);
  free_[slab] = free;
  link(slab);
}

uint32_t KvAllocator::fullest() const {
  for (size_t i = 0; i < nonempty_.size(); ++i) {
    if (nonempty_[i] == 0) continue;
    return static_cast<uint32_t>(i * kWordBits) +
           static_cast<uint32_t>(std::countr_zero(nonempty_[i]));
  }
  return 0;
}

std::vector<Slab> KvAllocator::lowest_unmapped(Slab count) const {
  std::vector<Slab> found;
  for (Slab slab = lowest_unmapped_hint_; found.size() < count; ++slab) {
    if (states_[slab] == State::unmapped) found.push_back(slab);
    if (found.empty()) lowest_unmapped_hint_ = slab + 1;
  }
  return found;
}

std::vector<Slab> KvAllocator::empty_mapped() const {
  std::vector<Slab> found;
  for (Slab slab = heads_[blocks_per_slab_]; slab != kNone; slab = next_[slab]) {
    found.push_back(slab);
  }
  std::sort(found.begin(), found.end());
  return found;
}

void KvAllocator::add_mapped(std::span<const Slab> slabs) {
  for (const Slab slab : slabs) {
    states_[slab] = State::mapped;
    free_[slab] = blocks_per_slab_ - count_owned(slab);
    free_mapped_blocks_ += free_[slab];
    --unmapped_slabs_;
    link(slab);
  }
}

void KvAllocator::remove_mapped(std::span<const Slab> slabs) {
  for (const Slab slab : slabs) {
    unlink(slab);
    free_mapped_blocks_ -= free_[slab];
    free_[slab] = 0;
    states_[slab] = State::unmapped;
    ++unmapped_slabs_;
    lowest_unmapped_hint_ = std::min(lowest_unmapped_hint_, slab);
  }
}

void KvAllocator::retire(std::span<const Slab> slabs) {
  for (const Slab slab : slabs) {
    if (states_[slab] == State::unmapped) {
      --unmapped_slabs_;
    } else {
      unlink(slab);
      free_mapped_blocks_ -= free_[slab];
      free_[slab] = 0;
    }
    states_[slab] = State::retired;
  }
}

void KvAllocator::take_from(Slab slab, std::span<int64_t> ids) {
  const int64_t first = first_block(slab);
  size_t filled = 0;
  for (size_t i = 0; filled < ids.size(); ++i) {
    uint64_t& owned = owned_[slab * words_per_slab_ + i];
    while (~owned != 0 && filled < ids.size()) {
      const auto position = static_cast<uint32_t>(std::countr_one(owned));
      owned |= bit(position);
      ids[filled++] = first + static_cast<int64_t>(i * kWordBits + position);
    }
  }
  set_free(slab, free_[slab] - static_cast<uint32_t>(ids.size()));
}

void KvAllocator::take(std::span<int64_t> ids) {
  live_blocks_ += static_cast<int64_t>(ids.size());
  free_mapped_blocks_ -= static_cast<int64_t>(ids.size());
  while (!ids.empty()) {
    const Slab slab = heads_[fullest()];
    const size_t count = std::min<size_t>(ids.size(), free_[slab]);
    take_from(slab, ids.first(count));
    ids = ids.subspan(count);
  }
}

Status KvAllocator::refuse(int64_t block) const {
  const std::string name = "block " + std::to_string(block);
  if (block < 0 || block >= total_blocks()) {
    return failure(Code::unknown_block, name + " is not of this KV cache, which has blocks " +
                                            std::to_string(reserved_blocks_) + " to " +
                                            std::to_string(total_blocks() - 1));
  }
  if (block < reserved_blocks_) {
    return failure(Code::unknown_block, name + " is reserved for padding and never allocated");
  }
  return failure(Code::double_free, name + " is not allocated; free each id once");
}

Status KvAllocator::disown(std::span<const int64_t> ids) {
  freed_.clear();
  int64_t first = -int64_t{blocks_per_slab_};  // of the slab of the last id; of none yet
  for (size_t i = 0; i < ids.size(); ++i) {
    const int64_t block = ids[i];
    if (block < reserved_blocks_ || block >= total_blocks())
      return undo_disown(ids.first(i), block);
    if (block < first || block >= first + blocks_per_slab_) {
      const auto slab = static_cast<Slab>(static_cast<uint64_t>(block) / blocks_per_slab_);
      first = first_block(slab);
      freed_.push_back({slab, 0});
    }
    const auto position = static_cast<uint64_t>(block - first);
    uint64_t& word = owned_[freed_.back().slab * words_per_slab_ + position / kWordBits];
    if ((word & bit(position)) == 0) return undo_disown(ids.first(i), block);
    word &= ~bit(position);
    ++freed_.back().blocks;
  }
  return {};
}

Status KvAllocator::undo_disown(std::span<const int64_t> ids, int64_t refused) {
  for (const int64_t block : ids) set_owned(block, true);
  return refuse(refused);
}

Status KvAllocator::give(std::span<const int64_t> ids, std::vector<Slab>& emptied) {
  KV_TRY(disown(ids));
  live_blocks_ -= static_cast<int64_t>(ids.size());
  free_mapped_blocks_ += static_cast<int64_t>(ids.size());
  for (const Freed& run : freed_) {
    set_free(run.slab, free_[run.slab] + run.blocks);
    if (free_[run.slab] == blocks_per_slab_) emptied.push_back(run.slab);
  }
  return {};
}

Status KvAllocator::check() const {
  int64_t live = -reserved_blocks_;
  int64_t free_mapped = 0;
  Slab unmapped = 0;
  for (Slab slab = 0; slab < slabs_; ++slab) {
    const uint32_t owned = count_owned(slab);
    live += owned;
    unmapped += states_[slab] == State::unmapped ? 1 : 0;
    if (states_[slab] == State::mapped) {
      free_mapped += blocks_per_slab_ - owned;
      if (free_[slab] != blocks_per_slab_ - owned) return broken("free blocks of a slab");
    } else if (owned != 0) {
      return broken("a block on an unmapped slab");
    }
  }
  if (live != live_blocks_) return broken("the number of live blocks");
  if (free_mapped != free_mapped_blocks_) return broken("the number of free mapped blocks");
  if (unmapped != unmapped_slabs_) return broken("the number of unmapped slabs");
  return {};
}

}  // namespace kvcached
