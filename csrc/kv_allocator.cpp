#include "kv_allocator.h"

#include <algorithm>
#include <bit>
#include <numeric>

namespace kvcached {

namespace {

constexpr uint32_t kWordBits = 64;
// Up to here the few blocks of a slab are cheaper one by one than as a run; they lie in one word.
constexpr uint32_t kNarrow = 16;
// And below this also one by one where they are consecutive.
constexpr size_t kShort = 8;

uint64_t bit(uint64_t position) { return uint64_t{1} << (position % kWordBits); }

// `count` ones from `position` on, which stay in the word.
uint64_t bits(uint32_t position, uint32_t count) {
  return (~uint64_t{0} >> (kWordBits - count)) << position;
}

// Without a way out before the end, so that the compiler makes vectors of it.
bool is_run(std::span<const int64_t> ids) {
  uint64_t different = 0;
  uint64_t expected = static_cast<uint64_t>(ids[0]);
  for (const int64_t id : ids) different |= static_cast<uint64_t>(id) ^ expected++;
  return different == 0;
}

Status broken(const std::string& what) {
  return failure(Code::internal, "KV allocator integrity: " + what + " does not add up");
}

}  // namespace

KvAllocator::KvAllocator(Slab slabs, uint32_t blocks_per_slab, int64_t reserved_blocks)
    : slabs_(slabs),
      blocks_per_slab_(blocks_per_slab),
      reserved_blocks_(reserved_blocks),
      slab_shift_(std::has_single_bit(blocks_per_slab) ? std::countr_zero(blocks_per_slab) : -1),
      words_per_slab_((blocks_per_slab + kWordBits - 1) / kWordBits),
      unmapped_slabs_(slabs),
      owned_(words_per_slab_ * slabs, 0),
      nodes_(slabs, {kNone, kNone}),
      heads_(blocks_per_slab + 1, kNone),
      nonempty_(blocks_per_slab / kWordBits + 1, 0) {
  for (int64_t block = 0; block < reserved_blocks; ++block) set_owned(block, true);
}

Slab KvAllocator::floor_slabs() const {
  return static_cast<Slab>((reserved_blocks_ + blocks_per_slab_ - 1) / blocks_per_slab_);
}

Slab KvAllocator::needed_slabs() const {
  return static_cast<Slab>((reserved_blocks_ + live_blocks_ + blocks_per_slab_ - 1) /
                           blocks_per_slab_);
}

Slab KvAllocator::slab_of(int64_t block) const {
  // A division costs more than all the rest of freeing a block.
  if (slab_shift_ >= 0) return static_cast<Slab>(block >> slab_shift_);
  return static_cast<Slab>(static_cast<uint64_t>(block) / blocks_per_slab_);
}

void KvAllocator::set_owned(int64_t block, bool owned) {
  const Slab slab = slab_of(block);
  const auto position = static_cast<uint64_t>(block - first_block(slab));
  uint64_t& word = owned_[slab * words_per_slab_ + position / kWordBits];
  word = owned ? word | bit(position) : word & ~bit(position);
}

bool KvAllocator::is_live(int64_t block) const {
  if (block < reserved_blocks_ || block >= total_blocks()) return false;
  const Slab slab = slab_of(block);
  const auto position = static_cast<uint64_t>(block - first_block(slab));
  return (owned_[slab * words_per_slab_ + position / kWordBits] & bit(position)) != 0;
}

uint32_t KvAllocator::count_owned(Slab slab) const {
  uint32_t count = 0;
  for (size_t i = 0; i < words_per_slab_; ++i) {
    count += static_cast<uint32_t>(std::popcount(owned_[slab * words_per_slab_ + i]));
  }
  return count;
}

void KvAllocator::link(Slab slab) {
  Node& node = nodes_[slab];
  if (node.free == 0) return;
  Slab& head = heads_[node.free];
  node.previous = kNone;
  node.next = head;
  if (head != kNone) {
    nodes_[head].previous = slab;
  } else {
    nonempty_[node.free / kWordBits] |= bit(node.free);
  }
  head = slab;
  if (node.free == blocks_per_slab_) ++empty_slabs_;
}

void KvAllocator::unlink(Slab slab) {
  const Node& node = nodes_[slab];
  if (node.free == 0) return;
  if (node.free == blocks_per_slab_) --empty_slabs_;
  if (node.next != kNone) nodes_[node.next].previous = node.previous;
  if (node.previous != kNone) {
    nodes_[node.previous].next = node.next;
    return;
  }
  heads_[node.free] = node.next;
  if (node.next == kNone) nonempty_[node.free / kWordBits] &= ~bit(node.free);
}

void KvAllocator::set_free(Slab slab, uint32_t free) {
  unlink(slab);
  nodes_[slab].free = free;
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
    if (nodes_[slab].state == State::unmapped) found.push_back(slab);
    if (found.empty()) lowest_unmapped_hint_ = slab + 1;
  }
  return found;
}

std::vector<Slab> KvAllocator::empty_mapped() const {
  std::vector<Slab> found;
  for (Slab slab = heads_[blocks_per_slab_]; slab != kNone; slab = nodes_[slab].next) {
    found.push_back(slab);
  }
  std::sort(found.begin(), found.end());
  return found;
}

void KvAllocator::add_mapped(std::span<const Slab> slabs) {
  for (const Slab slab : slabs) {
    if (nodes_[slab].state == State::unmapped) --unmapped_slabs_;
    nodes_[slab].state = State::mapped;
    ++mapped_slabs_;
    nodes_[slab].free = blocks_per_slab_ - count_owned(slab);
    free_mapped_blocks_ += nodes_[slab].free;
    link(slab);
  }
}

void KvAllocator::set_aside(std::span<const Slab> slabs) {
  for (const Slab slab : slabs) {
    if (nodes_[slab].state != State::mapped) continue;
    unlink(slab);
    free_mapped_blocks_ -= nodes_[slab].free;
    nodes_[slab].free = 0;
    nodes_[slab].state = State::aside;
    --mapped_slabs_;
  }
}

void KvAllocator::remove_mapped(std::span<const Slab> slabs) {
  set_aside(slabs);
  for (const Slab slab : slabs) {
    nodes_[slab].state = State::unmapped;
    ++unmapped_slabs_;
    lowest_unmapped_hint_ = std::min(lowest_unmapped_hint_, slab);
  }
}

void KvAllocator::retire(std::span<const Slab> slabs) {
  set_aside(slabs);
  for (const Slab slab : slabs) {
    if (nodes_[slab].state == State::unmapped) --unmapped_slabs_;
    nodes_[slab].state = State::retired;
    ++retired_slabs_;
  }
}

void KvAllocator::take_from(Slab slab, std::span<int64_t> ids) {
  uint64_t* word = &owned_[slab * words_per_slab_];
  int64_t first = first_block(slab);
  size_t filled = 0;
  for (; filled < ids.size(); ++word, first += kWordBits) {
    while (~*word != 0 && filled < ids.size()) {
      const auto position = static_cast<uint32_t>(std::countr_one(*word));
      const auto room = static_cast<uint32_t>(std::countr_zero(*word >> position));
      const auto count =
          std::min<size_t>(std::min(room, kWordBits - position), ids.size() - filled);
      *word |= bits(position, static_cast<uint32_t>(count));
      std::iota(&ids[filled], &ids[filled] + count, first + position);
      filled += count;
    }
  }
  set_free(slab, nodes_[slab].free - static_cast<uint32_t>(ids.size()));
}

void KvAllocator::take_rest_of(Slab slab, std::span<int64_t> ids) {
  uint64_t& word = owned_[slab];
  const int64_t first = first_block(slab);
  uint64_t unowned = ~word & bits(0, blocks_per_slab_);
  word |= unowned;
  const auto lowest = static_cast<uint32_t>(std::countr_zero(unowned));
  if (ids.size() >= kShort && unowned == bits(lowest, static_cast<uint32_t>(ids.size()))) {
    std::iota(ids.begin(), ids.end(), first + lowest);
    unowned = 0;
  }
  for (size_t i = 0; unowned != 0; ++i, unowned &= unowned - 1) {
    ids[i] = first + std::countr_zero(unowned);
  }
  unlink(slab);
  nodes_[slab].free = 0;
}

void KvAllocator::take(std::span<int64_t> ids) {
  live_blocks_ += static_cast<int64_t>(ids.size());
  free_mapped_blocks_ -= static_cast<int64_t>(ids.size());
  while (!ids.empty()) {
    const Slab slab = heads_[fullest()];
    const size_t count = std::min<size_t>(ids.size(), nodes_[slab].free);
    if (blocks_per_slab_ <= kNarrow && count == nodes_[slab].free) {
      take_rest_of(slab, ids.first(count));
    } else {
      take_from(slab, ids.first(count));
    }
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

size_t KvAllocator::run_length(std::span<const int64_t> ids, int64_t first) const {
  const int64_t in_slab = first + blocks_per_slab_ - ids[0];
  const size_t end = std::min(ids.size(), static_cast<size_t>(in_slab));
  size_t length = 1;
  while (length < end && ids[length] == ids[length - 1] + 1) ++length;
  return length;
}

uint32_t KvAllocator::disown_run(Slab slab, uint32_t position, uint32_t count) {
  uint64_t* word = &owned_[slab * words_per_slab_ + position / kWordBits];
  for (uint32_t done = 0; done < count; ++word) {
    const uint32_t offset = (position + done) % kWordBits;
    const uint32_t wanted = std::min(count - done, kWordBits - offset);
    const uint64_t mask = bits(offset, wanted);
    if (const uint64_t missing = ~*word & mask; missing != 0) {
      return done + static_cast<uint32_t>(std::countr_zero(missing)) - offset;
    }
    *word &= ~mask;
    done += wanted;
  }
  return count;
}

size_t KvAllocator::disown_narrow(Slab slab, std::span<const int64_t> ids) {
  const int64_t first = first_block(slab);
  uint64_t word = owned_[slab];
  const auto lowest = static_cast<uint32_t>(ids[0] - first);
  const auto rest = std::min<size_t>(ids.size(), blocks_per_slab_ - lowest);
  const uint64_t mask = bits(lowest, static_cast<uint32_t>(rest));
  if (rest >= kShort && (word & mask) == mask && is_run(ids.first(rest))) {
    owned_[slab] = word & ~mask;
    return rest;
  }
  size_t gone = 0;
  for (; gone < ids.size(); ++gone) {
    const auto position = static_cast<uint64_t>(ids[gone] - first);
    if (position >= blocks_per_slab_ || ids[gone] < reserved_blocks_) break;
    if ((word & bit(position)) == 0) break;
    word &= ~bit(position);
  }
  owned_[slab] = word;
  return gone;
}

size_t KvAllocator::disown_in(Slab slab, std::span<const int64_t> ids) {
  if (blocks_per_slab_ <= kNarrow) return disown_narrow(slab, ids);
  const int64_t first = first_block(slab);
  const auto count = static_cast<uint32_t>(run_length(ids, first));
  return disown_run(slab, static_cast<uint32_t>(ids[0] - first), count);
}

Status KvAllocator::disown(std::span<const int64_t> ids) {
  freed_.clear();
  const int64_t end = total_blocks();
  for (size_t i = 0; i < ids.size();) {
    const int64_t block = ids[i];
    if (block < reserved_blocks_ || block >= end) return undo_disown(ids.first(i), block);
    const Slab slab = slab_of(block);
    const size_t gone = disown_in(slab, ids.subspan(i));
    if (gone == 0) return undo_disown(ids.first(i), block);
    freed_.push_back({slab, static_cast<uint32_t>(gone)});
    i += gone;
  }
  return {};
}

Status KvAllocator::undo_disown(std::span<const int64_t> ids, int64_t refused) {
  for (const int64_t block : ids) set_owned(block, true);
  return refuse(refused);
}

Status KvAllocator::give(std::span<const int64_t> ids) {
  KV_TRY(disown(ids));
  live_blocks_ -= static_cast<int64_t>(ids.size());
  free_mapped_blocks_ += static_cast<int64_t>(ids.size());
  for (const Freed& run : freed_) set_free(run.slab, nodes_[run.slab].free + run.blocks);
  return {};
}

Status KvAllocator::check_give(std::span<const int64_t> ids) {
  KV_TRY(disown(ids));
  for (const int64_t block : ids) set_owned(block, true);
  return {};
}

Status KvAllocator::check_lists() const {
  Slab linked = 0;
  for (uint32_t free = 0; free < heads_.size(); ++free) {
    if (((nonempty_[free / kWordBits] & bit(free)) != 0) != (heads_[free] != kNone)) {
      return broken("the map of the lists of slabs");
    }
    Slab previous = kNone;
    for (Slab slab = heads_[free]; slab != kNone; slab = nodes_[slab].next) {
      const Node& node = nodes_[slab];
      const bool right = node.free == free && node.previous == previous &&
                         node.state == State::mapped && ++linked <= slabs_;
      if (!right) return broken("a list of slabs with room");
      previous = slab;
    }
  }
  const auto has_room = [](const Node& node) { return node.free != 0; };
  const auto with_room = std::count_if(nodes_.begin(), nodes_.end(), has_room);
  return with_room == linked ? Status{} : broken("the number of slabs with room");
}

Status KvAllocator::check() const {
  int64_t live = -reserved_blocks_;
  int64_t free_mapped = 0;
  Slab unmapped = 0;
  Slab mapped = 0;
  Slab empty = 0;
  for (Slab slab = 0; slab < slabs_; ++slab) {
    const uint32_t owned = count_owned(slab);
    live += owned;
    unmapped += nodes_[slab].state == State::unmapped ? 1 : 0;
    if (nodes_[slab].state == State::mapped) {
      free_mapped += blocks_per_slab_ - owned;
      ++mapped;
      empty += owned == 0 ? 1 : 0;
      if (nodes_[slab].free != blocks_per_slab_ - owned) return broken("free blocks of a slab");
    } else if (owned != 0) {
      return broken("a block on an unmapped slab");
    }
  }
  if (live != live_blocks_) return broken("the number of live blocks");
  if (free_mapped != free_mapped_blocks_) return broken("the number of free mapped blocks");
  if (unmapped != unmapped_slabs_) return broken("the number of unmapped slabs");
  if (mapped != mapped_slabs_) return broken("the number of mapped slabs");
  if (empty != empty_slabs_) return broken("the number of empty slabs");
  return check_lists();
}

}  // namespace kvcached
