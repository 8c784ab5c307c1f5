// KvAllocator::check: recomputes every count and link from the ownership bitmap.
#include <algorithm>

#include "kv_allocator.h"

namespace kvcached {

namespace {

Status broken(const std::string& what) {
  return failure(Code::internal, "KV allocator integrity: ", what, " does not add up");
}

}  // namespace

Status KvAllocator::check_lists() const {
  Slab linked = 0;
  for (uint32_t free = 0; free < heads_.size(); ++free) {
    if ((nonempty_[free / kWordBits] >> (free % kWordBits) & 1) !=
        (heads_[free] != kNone ? 1 : 0)) {
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
