#include "virtual_tensor.h"

namespace kvcached {

Result<std::shared_ptr<VirtualTensor>> VirtualTensor::create(std::shared_ptr<Client> client,
                                                             uint64_t bytes) {
  KV_ASSIGN(std::shared_ptr<Region> region, client->reserve_region(bytes));
  return std::shared_ptr<VirtualTensor>(new VirtualTensor(std::move(client), std::move(region)));
}

VirtualTensor::VirtualTensor(std::shared_ptr<Client> client, std::shared_ptr<Region> region)
    : client_(std::move(client)), region_(std::move(region)), pool_(client_) {}

VirtualTensor::~VirtualTensor() {
  // What a failure leaves mapped is given back when the client closes.
  (void)close();
}

uint64_t VirtualTensor::mapped_bytes() const {
  return region_->mapped_pages() * client_->page_bytes();
}

Result<PageRun> VirtualTensor::run_of(uint64_t offset, uint64_t bytes) const {
  if (closed_) return failure(Code::closed, "the virtual tensor was freed");
  KV_TRY(client_->check_open());
  const uint64_t page = client_->page_bytes();
  if (offset % page != 0 || bytes % page != 0) {
    return failure(Code::not_aligned, "offset and size must be multiples of the page size, ", page,
                   " bytes");
  }
  return PageRun{offset / page, bytes / page};
}

Status VirtualTensor::map(uint64_t offset, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  KV_ASSIGN(PageRun run, run_of(offset, bytes));
  const std::span<const PageRun> runs(&run, 1);
  KV_TRY(region_->check_unmapped(runs));
  KV_ASSIGN(std::vector<Handle> pages, pool_.take(run.pages));
  Status mapped = region_->map(runs, pages);
  if (mapped.ok()) client_->count_maps(1, 0);
  if (mapped.ok() || mapped.code == Code::stranded) return mapped;
  KV_TRY(pool_.give(pages));
  return mapped;
}

Status VirtualTensor::unmap(uint64_t offset, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  KV_ASSIGN(PageRun run, run_of(offset, bytes));
  const std::span<const PageRun> runs(&run, 1);
  KV_TRY(region_->check_mapped(runs));
  KV_TRY(client_->streams().wait());
  KV_ASSIGN(std::vector<Handle> pages, region_->unmap(runs));
  client_->count_maps(0, 1);
  return pool_.give(pages);
}

Status VirtualTensor::check_viewable() {
  const std::lock_guard lock(mutex_);
  return closed_ ? failure(Code::closed, "the virtual tensor was freed") : Status{};
}

Status VirtualTensor::close() {
  const std::lock_guard lock(mutex_);
  if (closed_) return {};
  if (client_->check_open().ok()) {
    KV_TRY(client_->streams().wait());
    const uint64_t unmaps_before = region_->counters().unmaps;
    KV_ASSIGN(std::vector<Handle> pages, region_->unmap_all());
    client_->count_maps(0, region_->counters().unmaps - unmaps_before);
    KV_TRY(pool_.give(pages));
  }
  closed_ = true;
  return {};
}

}  // namespace kvcached
