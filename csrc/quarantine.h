// Slabs of a KV cache that hold no live block any more while the engine's streams may still have
// work on them. They stay mapped and charged. The cache takes them back for new blocks, which
// stream order makes safe, or unmaps them once the fence behind their last use has passed.
// Thread rule: the owner's.
#pragma once

#include <deque>

#include "kv_allocator.h"
#include "streams.h"

namespace kvcached {

class Quarantine {
 public:
  // REQUIRES: made after the last work on the slabs was submitted; added in the order of making.
  void add(Fence fence, std::vector<Slab> slabs);
  // Up to `count` slabs, those first that came last.
  std::vector<Slab> take_back(size_t count);
  // Those whose fence has passed, ascending. Of an error, those before it are answered; without
  // any it is the answer.
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
