// A reserved range of virtual memory, backed page by page. Its calls take many runs of pages at
// once (one per layer and buffer, say): one call to the backend per run, and all or nothing over
// the whole batch. Should a rollback fail as well, the answer is Code::stranded, part of the range
// is in an unknown state, and the region keeps every handle of the batch until unmap_all.
// Thread rule: the owner's; the last reference may be dropped on any thread.
#pragma once

#include <atomic>

#include "address_space.h"
#include "non_copyable.h"
#include "vmm.h"

namespace kvcached {

struct PageRun {
  uint64_t first_page;
  uint64_t pages;
};

struct MapCounters {
  uint64_t maps = 0;  // calls to the backend, one per run
  uint64_t unmaps = 0;
  uint64_t pages_mapped = 0;
  uint64_t pages_unmapped = 0;
};

class Region : private NonCopyable {
 public:
  // Addresses of its own.
  static Result<std::shared_ptr<Region>> reserve(std::shared_ptr<Vmm> vmm, uint64_t bytes);
  // A range of `space`, given back with the last reference. Null if the space has none so large.
  static std::shared_ptr<Region> carve(std::shared_ptr<Vmm> vmm,
                                       std::shared_ptr<AddressSpace> space, uint64_t bytes);
  ~Region();

  uint64_t address() const { return address_; }
  uint64_t bytes() const { return bytes_; }
  // From any thread.
  uint64_t mapped_pages() const { return mapped_pages_; }
  const MapCounters& counters() const { return counters_; }
  const std::shared_ptr<Vmm>& vmm() const { return vmm_; }

  // Whether map could take these runs: inside the range, nothing mapped there.
  Status check_unmapped(std::span<const PageRun> runs) const { return check_runs(runs, false); }
  Status check_mapped(std::span<const PageRun> runs) const { return check_runs(runs, true); }
  // Backs the runs, in order, with the handles, in order, ready for access.
  // REQUIRES: as many handles as pages.
  Status map(std::span<const PageRun> runs, std::span<const Handle> handles);
  // The handles that backed the runs.
  Result<std::vector<Handle>> unmap(std::span<const PageRun> runs);
  // The handles that back these pages, in their order.
  Result<std::vector<Handle>> backing(std::span<const uint64_t> pages) const;
  // Unmaps whatever is mapped. Returns those handles and the stranded ones.
  Result<std::vector<Handle>> unmap_all();

 private:
  Region(std::shared_ptr<Vmm> vmm, std::shared_ptr<AddressSpace> space, uint64_t address,
         uint64_t bytes);

  Status check_runs(std::span<const PageRun> runs, bool mapped) const;
  uint64_t address_of(uint64_t page) const { return address_ + page * vmm_->page_bytes(); }
  Status map_run(const PageRun& run, std::span<const Handle> handles);
  Status unmap_run(const PageRun& run);
  Status strand(std::span<const Handle> handles, const Status& cause);
  // The maximal runs of backed pages.
  std::vector<PageRun> mapped_runs() const;

  const std::shared_ptr<Vmm> vmm_;
  const std::shared_ptr<AddressSpace> space_;  // null: the reservation is the region's own
  const uint64_t address_;
  const uint64_t bytes_;
  std::vector<Handle> handles_;   // by page; kNoHandle is a hole
  std::vector<Handle> stranded_;  // owned by the region alone, and not mapped
  std::atomic<uint64_t> mapped_pages_ = 0;
  MapCounters counters_;
};

}  // namespace kvcached
