#include "kv_allocator.h"

#include <algorithm>
#include <bit>
#include <numeric>

namespace kvcached {

namespace {

// Largest slab, in blocks, whose blocks are freed one by one: that is cheaper than as a run. One
// word.
constexpr uint32_t kNarrow = 16;
// Shortest run of consecutive blocks that is freed as a run.
constexpr size_t kShort = 8;

uint64_t bit(uint64_t position) { return uint64_t{1} << (position % KvAllocator::kWordBits); }

// `count` ones from bit `position`. REQUIRES: they fit in the word
uint64_t bits(uint32_t position, uint32_t count) {
  return (~uint64_t{0} >> (KvAllocator::kWordBits - count)) << position;
}

// No early exit, so that the compiler vectorises the loop.
bool is_run(std::span<const int64_t> ids) {
  uint64_t different = 0;
  uint64_t expected = static_cast<uint64_t>(ids[0]);
  for (const int64_t id : ids) different |= static_cast<uint64_t>(id) ^ expected++;
  return different == 0;
}

// Number of the first ids that are consecutive.
size_t run_of(std::span<const int64_t> ids) {
  if (ids.size() >= kShort && is_run(ids)) return ids.size();
  size_t length = ids.empty() ? 0 : 1;
  while (length < ids.size() && ids[length] == ids[length - 1] + 1) ++length;
  return length;
}

// Writes the blocks of the ones in `unowned`, ascending. `first` is the block of the lowest bit.
void write_ids(int64_t first, uint64_t unowned, std::span<int64_t> ids) {
  const int64_t lowest = first + std::countr_zero(unowned);
  const uint64_t run = unowned >> std::countr_zero(unowned);
  if ((run & (run + 1)) == 0) {
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = lowest + static_cast<int64_t>(i);
    return;
  }
  for (size_t i = 0; unowned != 0; ++i, unowned &= unowned - 1) {
    ids[i] = first + std::countr_zero(unowned);
  }
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
  // A division would cost more than the rest of freeing a block.
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

size_t KvAllocator::take_whole(uint32_t free, std::span<int64_t> ids) {
  Slab slab = heads_[free];
  size_t filled = 0;
  for (; slab != kNone && ids.size() - filled >= free; slab = nodes_[slab].next) {
    const uint64_t unowned = ~owned_[slab] & bits(0, blocks_per_slab_);
    owned_[slab] |= unowned;
    nodes_[slab].free = 0;
    write_ids(first_block(slab), unowned, ids.subspan(filled, free));
    filled += free;
  }
  heads_[free] = slab;
  if (slab != kNone) {
    nodes_[slab].previous = kNone;
  } else {
    nonempty_[free / kWordBits] &= ~bit(free);
  }
  if (free == blocks_per_slab_) empty_slabs_ -= static_cast<Slab>(filled / free);
  return filled;
}

void KvAllocator::take(std::span<int64_t> ids) {
  live_blocks_ += static_cast<int64_t>(ids.size());
  free_mapped_blocks_ -= static_cast<int64_t>(ids.size());
  while (!ids.empty()) {
    const uint32_t free = fullest();
    if (blocks_per_slab_ <= kNarrow && free <= ids.size()) {
      ids = ids.subspan(take_whole(free, ids));
      continue;
    }
    const size_t count = std::min<size_t>(ids.size(), free);
    take_from(heads_[free], ids.first(count));
    ids = ids.subspan(count);
  }
}

Status KvAllocator::refuse(int64_t block) const {
  const std::string name = "block " + std::to_string(block);
  if (block < 0 || block >= total_blocks()) {
    return failure(Code::unknown_block, name,
                   " does not belong to this KV cache, which has blocks ", reserved_blocks_, " to ",
                   total_blocks() - 1);
  }
  if (block < reserved_blocks_) {
    return failure(Code::unknown_block, name, " is reserved for padding and never allocated");
  }
  return failure(Code::double_free, name, " is not allocated; free each id once");
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
  uint64_t& word = owned_[slab];
  const auto lowest = static_cast<uint32_t>(ids[0] - first_block(slab));
  const auto owned = static_cast<size_t>(std::countr_one(word >> lowest));
  const size_t longest = std::min(owned, ids.size());
  const size_t count = run_of(ids.first(longest));
  if (count < longest) return disown_scattered(slab, ids);
  if (count > 0) word &= ~bits(lowest, static_cast<uint32_t>(count));
  return count;
}

size_t KvAllocator::disown_scattered(Slab slab, std::span<const int64_t> ids) {
  const int64_t first = first_block(slab);
  uint64_t word = owned_[slab];
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

size_t KvAllocator::release_alike(std::span<const int64_t> ids, uint32_t count) {
  const int64_t end = total_blocks();
  Slab head = heads_[count];
  size_t gone = 0;
  while (head != kNone && ids.size() - gone >= count) {
    const int64_t block = ids[gone];
    if (block < reserved_blocks_ || block >= end) break;
    const Slab slab = slab_of(block);
    const uint64_t mask = bits(static_cast<uint32_t>(block - first_block(slab)), count);
    const bool alike = nodes_[slab].free == 0 && (owned_[slab] & mask) == mask;
    if (!alike || run_of(ids.subspan(gone, count)) < count) break;
    owned_[slab] &= ~mask;
    nodes_[slab] = {head, kNone, count, State::mapped};
    nodes_[head].previous = slab;
    head = slab;
    gone += count;
  }
  heads_[count] = head;
  if (count == blocks_per_slab_) empty_slabs_ += static_cast<Slab>(gone / count);
  return gone;
}

size_t KvAllocator::release(std::span<const int64_t> ids) {
  const int64_t end = total_blocks();
  size_t gone = 0;
  while (gone < ids.size() && ids[gone] >= reserved_blocks_ && ids[gone] < end) {
    const Slab slab = slab_of(ids[gone]);
    const auto count = static_cast<uint32_t>(disown_in(slab, ids.subspan(gone)));
    if (count == 0) break;
    set_free(slab, nodes_[slab].free + count);
    gone += count;
    if (blocks_per_slab_ <= kNarrow) gone += release_alike(ids.subspan(gone), count);
  }
  return gone;
}

void KvAllocator::take_back(std::span<const int64_t> ids) {
  for (size_t i = 0; i < ids.size();) {
    const Slab slab = slab_of(ids[i]);
    uint32_t count = 0;
    for (; i < ids.size() && slab_of(ids[i]) == slab; ++i, ++count) set_owned(ids[i], true);
    set_free(slab, nodes_[slab].free - count);
  }
}

Status KvAllocator::give(std::span<const int64_t> ids) {
  const size_t gone = release(ids);
  if (gone < ids.size()) {
    take_back(ids.first(gone));
    return refuse(ids[gone]);
  }
  live_blocks_ -= static_cast<int64_t>(ids.size());
  free_mapped_blocks_ += static_cast<int64_t>(ids.size());
  return {};
}

Status KvAllocator::check_give(std::span<const int64_t> ids) {
  const size_t gone = release(ids);
  take_back(ids.first(gone));
  return gone < ids.size() ? refuse(ids[gone]) : Status{};
}

}  // namespace kvcached
