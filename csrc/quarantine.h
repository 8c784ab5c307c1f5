// Slabs of a KV cache without a live block on which the engine's streams may still have work. They
// stay mapped and charged. The cache takes them back for new blocks, which stream order makes safe,
// or unmaps them once the fence after their last use has passed. Thread rule: the owner's.
#pragma once

#include <deque>

#include "kv_allocator.h"
#include "streams.h"

namespace kvcached {

class Quarantine {
 public:
  // REQUIRES: the fence was made after the last work on the slabs was submitted. Fences are added
  // in the order in which they were made.
  void add(Fence fence, std::vector<Slab> slabs);
  // Takes up to `count` slabs, the latest first.
  std::vector<Slab> take_back(size_t count);
  // Takes the slabs whose fence has passed, ascending. An error is returned only if no slab
  // precedes it.
  Result<std::vector<Slab>> take_passed();

  size_t slabs() const { return count_; }

 private:
  struct Entry {
    Fence fence;
    std::vector<Slab> slabs;
  };

  std::deque<Entry> entries_;  // the oldest first
  size_t count_ = 0;
};

}  // namespace kvcached
