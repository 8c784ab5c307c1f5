// Choice of the prefix-cache blocks to evict to free memory: whole slabs, because a slab is
// unmapped only when its last block is freed. Every slab frees the same memory, so the slab with
// the fewest blocks goes first, and among equals the least recently used one. Thread rule: that of
// the allocator.
#pragma once

#include "kv_allocator.h"

namespace kvcached {

struct Eviction {
  std::vector<int64_t> ids;  // slab by slab, in the order of eviction
  uint64_t slabs = 0;        // whole slabs that these blocks fill
  uint64_t freed_bytes = 0;
};

// Chooses at most `slabs` slabs that hold no other blocks than these. `ids` are blocks that no
// request uses, `last_used` their times on any clock. Code::invalid_argument, Code::unknown_block,
// Code::double_free (also for an id named twice).
Result<Eviction> choose_evictions(const KvAllocator& blocks, std::span<const int64_t> ids,
                                  std::span<const int64_t> last_used, uint64_t slabs);

}  // namespace kvcached
