#include "kv_layout.h"

#include <algorithm>
#include <numeric>

namespace kvcached {

Result<uint64_t> region_bytes(const KvGeometry& geometry, uint64_t page_bytes) {
  const std::vector<uint64_t>& pages = geometry.slab_pages;
  const int64_t blocks = int64_t{geometry.slabs} * geometry.blocks_per_slab;
  if (blocks == 0 || pages.empty() || std::count(pages.begin(), pages.end(), 0) != 0) {
    return failure(Code::invalid_argument, "a KV cache needs buffers, slabs and blocks");
  }
  if (geometry.reserved_blocks < 0 || geometry.reserved_blocks >= blocks) {
    return failure(Code::invalid_argument, "reserved_blocks must be at least 0 and below the ",
                   blocks, " blocks of the cache");
  }
  const uint64_t slab_bytes = std::accumulate(pages.begin(), pages.end(), uint64_t{0}) * page_bytes;
  uint64_t bytes = 0;
  if (__builtin_mul_overflow(slab_bytes, uint64_t{geometry.slabs}, &bytes)) {
    return failure(Code::invalid_argument, "the KV cache exceeds the address space");
  }
  return bytes;
}

KvLayout::KvLayout(std::vector<uint64_t> slab_pages, Slab slabs)
    : slab_pages_(std::move(slab_pages)) {
  for (const uint64_t pages : slab_pages_) {
    first_pages_.push_back(pages_per_slab_ * slabs);
    pages_per_slab_ += pages;
  }
}

std::vector<PageRun> KvLayout::runs_of(std::span<const Slab> slabs) const {
  std::vector<PageRun> runs;
  for (size_t first = 0; first < slabs.size();) {
    size_t end = first + 1;
    while (end < slabs.size() && slabs[end] == slabs[end - 1] + 1) ++end;
    for (size_t buffer = 0; buffer < slab_pages_.size(); ++buffer) {
      const uint64_t pages = slab_pages_[buffer];
      runs.push_back({first_pages_[buffer] + slabs[first] * pages, (end - first) * pages});
    }
    first = end;
  }
  return runs;
}

}  // namespace kvcached
