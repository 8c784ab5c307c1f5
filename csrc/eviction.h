// Which blocks of a prefix cache to give up so that memory comes free: whole slabs, since a slab
// goes back only when its last block does. Every slab is worth the same, so the one that costs the
// fewest blocks goes first, and among those the one that was used longest ago.
// Thread rule: the owner's of the allocator.
#pragma once

#include "kv_allocator.h"

namespace kvcached {

struct Eviction {
  std::vector<int64_t> ids;  // slab after slab, in the order in which the slabs should go
  uint64_t slabs = 0;        // that hold these blocks and no others
  uint64_t freed_bytes = 0;
};

// `ids` are blocks that no request uses, `last_used` any clock of the caller's for each of them. At
// most `slabs` slabs; fewer where there are no more without a block in use.
// Code::invalid_argument, Code::unknown_block, Code::double_free (also for an id named twice).
Result<Eviction> choose_evictions(const KvAllocator& blocks, std::span<const int64_t> ids,
                                  std::span<const int64_t> last_used, uint64_t slabs);

}  // namespace kvcached
