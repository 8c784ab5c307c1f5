// The place of a KV cache's slabs in its region: buffer after buffer (K and V of each layer), and
// in each buffer all slabs in order.
#pragma once

#include <span>
#include <vector>

#include "kv_allocator.h"
#include "region.h"

namespace kvcached {

struct KvGeometry {
  std::vector<uint64_t> slab_pages;  // pages of one slab in each buffer
  Slab slabs = 0;
  uint32_t blocks_per_slab = 0;
  int64_t reserved_blocks = 0;
};

// Bytes of a region for this geometry. Code::invalid_argument if no cache can have it.
Result<uint64_t> region_bytes(const KvGeometry& geometry, uint64_t page_bytes);

class KvLayout {
 public:
  KvLayout(std::vector<uint64_t> slab_pages, Slab slabs);

  // In all buffers together.
  uint64_t pages_per_slab() const { return pages_per_slab_; }
  // First page of a buffer in the region.
  uint64_t first_page(size_t buffer) const { return first_pages_[buffer]; }
  // Pages of these slabs in the region. Adjacent slabs are one run in each buffer.
  std::vector<PageRun> runs_of(std::span<const Slab> slabs) const;

 private:
  const std::vector<uint64_t> slab_pages_;
  std::vector<uint64_t> first_pages_;
  uint64_t pages_per_slab_ = 0;
};

}  // namespace kvcached
