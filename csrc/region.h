// A reserved range of virtual memory, backed page by page. Its calls take many runs of pages at
// once (one for each layer and buffer, for example): one call to the backend for each run, and all
// or nothing over the whole batch. If a rollback fails as well, the call fails with Code::stranded,
// part of the range is in an unknown state, and the region keeps every handle of the batch until
// unmap_all.
// Thread rule: the owner's. The last reference may be dropped on any thread.
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
  // Reserves a separate range of addresses.
  static Result<std::shared_ptr<Region>> reserve(std::shared_ptr<Vmm> vmm, uint64_t bytes);
  // Takes a range of `space`, and returns it with the last reference. Null if `space` has no range
  // of that size.
  static std::shared_ptr<Region> carve(std::shared_ptr<Vmm> vmm,
                                       std::shared_ptr<AddressSpace> space, uint64_t bytes);
  ~Region();

  uint64_t address() const { return address_; }
  uint64_t bytes() const { return bytes_; }
  // From any thread.
  uint64_t mapped_pages() const { return mapped_pages_; }
  const MapCounters& counters() const { return counters_; }
  const std::shared_ptr<Vmm>& vmm() const { return vmm_; }

  // Code::invalid_argument unless the runs are inside the range, Code::already_mapped unless all of
  // their pages are holes (check_unmapped), Code::not_mapped unless none is (check_mapped).
  Status check_unmapped(std::span<const PageRun> runs) const { return check_runs(runs, false); }
  Status check_mapped(std::span<const PageRun> runs) const { return check_runs(runs, true); }
  // Maps the handles, in order, to the pages of the runs, in order, ready for access.
  // REQUIRES: as many handles as pages
  Status map(std::span<const PageRun> runs, std::span<const Handle> handles);
  // Returns the handles that backed the runs.
  Result<std::vector<Handle>> unmap(std::span<const PageRun> runs);
  // Returns the handles that back these pages, in the same order.
  Result<std::vector<Handle>> backing(std::span<const uint64_t> pages) const;
  // Returns the copies with addresses as targets instead of offsets in the region.
  // Code::invalid_argument, or Code::not_mapped unless all targets are on mapped pages.
  Result<std::vector<CopyRun>> locate(std::span<const CopyRun> runs) const;
  // Unmaps all mapped pages. Returns their handles and the stranded ones.
  Result<std::vector<Handle>> unmap_all();

 private:
  Region(std::shared_ptr<Vmm> vmm, std::shared_ptr<AddressSpace> space, uint64_t address,
         uint64_t bytes);

  Status check_runs(std::span<const PageRun> runs, bool mapped) const;
  uint64_t address_of(uint64_t page) const { return address_ + page * vmm_->page_bytes(); }
  Status map_run(const PageRun& run, std::span<const Handle> handles);
  Status unmap_run(const PageRun& run);
  Status strand(std::span<const Handle> handles, const Status& cause);
  // Maximal runs of backed pages.
  std::vector<PageRun> mapped_runs() const;

  const std::shared_ptr<Vmm> vmm_;
  const std::shared_ptr<AddressSpace> space_;  // null: the region owns its reservation
  const uint64_t address_;
  const uint64_t bytes_;
  std::vector<Handle> handles_;   // by page; kNoHandle is a hole
  std::vector<Handle> stranded_;  // of batches that could not be undone
  std::atomic<uint64_t> mapped_pages_ = 0;
  MapCounters counters_;
};

}  // namespace kvcached
