#include "region.h"

#include <algorithm>

namespace kvcached {

Result<std::shared_ptr<Region>> Region::reserve(std::shared_ptr<Vmm> vmm, uint64_t bytes) {
  KV_ASSIGN(uint64_t address, vmm->reserve(bytes));
  return std::shared_ptr<Region>(new Region(std::move(vmm), nullptr, address, bytes));
}

std::shared_ptr<Region> Region::carve(std::shared_ptr<Vmm> vmm, std::shared_ptr<AddressSpace> space,
                                      uint64_t bytes) {
  const uint64_t address = space->take(bytes);
  if (address == 0) return nullptr;
  return std::shared_ptr<Region>(new Region(std::move(vmm), std::move(space), address, bytes));
}

Region::Region(std::shared_ptr<Vmm> vmm, std::shared_ptr<AddressSpace> space, uint64_t address,
               uint64_t bytes)
    : vmm_(std::move(vmm)),
      space_(std::move(space)),
      address_(address),
      bytes_(bytes),
      handles_(bytes / vmm_->page_bytes(), kNoHandle) {}

Region::~Region() {
  // The owner unmapped everything, or closed the client, which did. If both failed, the addresses
  // stay reserved until the Vmm is destroyed.
  if (space_ == nullptr) {
    (void)vmm_->free_address(address_, bytes_);
  } else if (mapped_pages_ == 0 && stranded_.empty()) {
    space_->give(address_, bytes_);
  }
}

Status Region::check_runs(std::span<const PageRun> runs, bool mapped) const {
  for (const PageRun& run : runs) {
    if (run.pages == 0 || run.first_page >= handles_.size() ||
        run.pages > handles_.size() - run.first_page) {
      return failure(Code::invalid_argument, "the range is empty or outside the tensor of ", bytes_,
                     " bytes");
    }
    for (uint64_t i = 0; i < run.pages; ++i) {
      if ((handles_[run.first_page + i] != kNoHandle) == mapped) continue;
      return mapped ? failure(Code::not_mapped, "part of the range is not mapped; map it first")
                    : failure(Code::already_mapped,
                              "part of the range is mapped already; unmap it first");
    }
  }
  return {};
}

Status Region::map_run(const PageRun& run, std::span<const Handle> handles) {
  KV_TRY(vmm_->map_accessible(address_of(run.first_page), handles));
  std::copy(handles.begin(), handles.end(),
            handles_.begin() + static_cast<std::ptrdiff_t>(run.first_page));
  ++counters_.maps;
  counters_.pages_mapped += run.pages;
  mapped_pages_ += run.pages;
  return {};
}

Status Region::unmap_run(const PageRun& run) {
  KV_TRY(vmm_->unmap(address_of(run.first_page), run.pages * vmm_->page_bytes()));
  const auto first = handles_.begin() + static_cast<std::ptrdiff_t>(run.first_page);
  std::fill(first, first + static_cast<std::ptrdiff_t>(run.pages), kNoHandle);
  ++counters_.unmaps;
  counters_.pages_unmapped += run.pages;
  mapped_pages_ -= run.pages;
  return {};
}

Status Region::strand(std::span<const Handle> handles, const Status& cause) {
  for (const Handle handle : handles) {
    if (std::find(handles_.begin(), handles_.end(), handle) == handles_.end()) {
      stranded_.push_back(handle);
    }
  }
  return failure(Code::stranded, "a failed batch could not be undone: ", cause.message);
}

Status Region::map(std::span<const PageRun> runs, std::span<const Handle> handles) {
  KV_TRY(check_runs(runs, false));
  std::span<const Handle> rest = handles;
  for (size_t i = 0; i < runs.size(); ++i) {
    const Status status = map_run(runs[i], rest.first(runs[i].pages));
    if (status.ok()) {
      rest = rest.subspan(runs[i].pages);
      continue;
    }
    for (size_t done = i; done-- > 0;) {
      if (!unmap_run(runs[done]).ok()) return strand(handles, status);
    }
    return status.code == Code::stranded ? strand(handles, status) : status;
  }
  return {};
}

Result<std::vector<Handle>> Region::unmap(std::span<const PageRun> runs) {
  KV_TRY(check_runs(runs, true));
  std::vector<Handle> handles;
  for (size_t i = 0; i < runs.size(); ++i) {
    const std::span<Handle> backing =
        std::span(handles_).subspan(runs[i].first_page, runs[i].pages);
    handles.insert(handles.end(), backing.begin(), backing.end());
    const Status status = unmap_run(runs[i]);
    if (status.ok()) continue;
    std::span<const Handle> undone = std::span<const Handle>(handles);
    for (size_t done = 0; done < i; ++done) {
      if (!map_run(runs[done], undone.first(runs[done].pages)).ok()) return strand(handles, status);
      undone = undone.subspan(runs[done].pages);
    }
    return status;
  }
  return handles;
}

Result<std::vector<Handle>> Region::backing(std::span<const uint64_t> pages) const {
  std::vector<Handle> handles;
  for (const uint64_t page : pages) {
    const PageRun run = {page, 1};
    KV_TRY(check_mapped(std::span(&run, 1)));
    handles.push_back(handles_[page]);
  }
  return handles;
}

Result<std::vector<CopyRun>> Region::locate(std::span<const CopyRun> runs) const {
  std::vector<CopyRun> located(runs.begin(), runs.end());
  for (CopyRun& run : located) {
    if (run.bytes == 0 || run.target >= bytes_ || run.bytes > bytes_ - run.target) {
      return failure(Code::invalid_argument, "a copy is empty or reaches beyond the region");
    }
    const uint64_t first = run.target / vmm_->page_bytes();
    const uint64_t last = (run.target + run.bytes - 1) / vmm_->page_bytes();
    const PageRun touched = {first, last - first + 1};
    KV_TRY(check_mapped(std::span(&touched, 1)));
    run.target += address_;
  }
  return located;
}

std::vector<PageRun> Region::mapped_runs() const {
  std::vector<PageRun> runs;
  for (uint64_t page = 0; page < handles_.size(); ++page) {
    if (handles_[page] == kNoHandle) continue;
    if (!runs.empty() && runs.back().first_page + runs.back().pages == page) {
      ++runs.back().pages;
    } else {
      runs.push_back({page, 1});
    }
  }
  return runs;
}

Result<std::vector<Handle>> Region::unmap_all() {
  KV_ASSIGN(std::vector<Handle> handles, unmap(mapped_runs()));
  handles.insert(handles.end(), stranded_.begin(), stranded_.end());
  stranded_.clear();
  return handles;
}

}  // namespace kvcached
