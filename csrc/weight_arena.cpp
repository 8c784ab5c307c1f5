#include "weight_arena.h"

#include <algorithm>

namespace kvcached {

Result<std::shared_ptr<WeightArena>> WeightArena::create(std::shared_ptr<Client> client,
                                                         uint64_t bytes) {
  if (Status status = client->check_open(); !status.ok()) return status;
  const uint64_t page = client->page_bytes();
  if (bytes == 0 || bytes > UINT64_MAX - page) {
    return failure(Code::invalid_argument, "an arena of " + std::to_string(bytes) + " bytes");
  }
  Result<std::shared_ptr<Region>> region = client->reserve_region((bytes + page - 1) / page * page);
  if (!region.ok()) return region.status();
  if (Status status = client->reserve_static(region.value()->bytes()); !status.ok()) return status;
  return std::shared_ptr<WeightArena>(
      new WeightArena(std::move(client), std::move(region.value())));
}

WeightArena::WeightArena(std::shared_ptr<Client> client, std::shared_ptr<Region> region)
    : client_(std::move(client)), region_(std::move(region)) {}

WeightArena::~WeightArena() {
  // What a failure leaves behind is given back when the client closes.
  (void)close();
}

uint64_t WeightArena::backed_bytes() const {
  return region_->mapped_pages() * client_->page_bytes();
}

Status WeightArena::back(uint64_t bytes, uint64_t ahead_bytes) {
  const std::lock_guard lock(mutex_);
  if (closed_) return failure(Code::closed, "the arena was freed");
  KV_TRY(client_->check_open());
  if (bytes > region_->bytes()) {
    return failure(Code::invalid_argument, "the arena has " + std::to_string(region_->bytes()) +
                                               " bytes, not " + std::to_string(bytes));
  }
  const uint64_t page = client_->page_bytes();
  const uint64_t backed = backed_bytes();
  // A second failure to release would lose the first one's pages.
  if (!owed_.empty()) return failure(Code::stranded, "pages could not be released; free the arena");
  if (bytes <= backed) return {};
  const uint64_t end = bytes + std::min(ahead_bytes, region_->bytes() - bytes);
  return grow((end + page - 1) / page - region_->mapped_pages());
}

Status WeightArena::grow(uint64_t pages) {
  Result<std::vector<Handle>> handles = client_->create_pages(pages);
  if (!handles.ok()) return handles.status();
  const PageRun run = {region_->mapped_pages(), pages};
  Status mapped = region_->map(std::span(&run, 1), handles.value());
  if (mapped.ok()) {
    client_->count_maps(1, 0);
  } else if (mapped.code != Code::stranded) {
    if (!client_->vmm()->release(handles.value()).ok()) owed_ = std::move(handles.value());
  }
  return mapped;
}

Status WeightArena::give_pages_back() {
  Result<std::vector<Handle>> handles = region_->unmap_all();
  if (!handles.ok()) return handles.status();
  if (!handles.value().empty()) client_->count_maps(0, 1);
  owed_.insert(owed_.end(), handles.value().begin(), handles.value().end());
  if (owed_.empty()) return {};
  KV_TRY(client_->vmm()->release(owed_));
  owed_.clear();
  return {};
}

Status WeightArena::close() {
  const std::lock_guard lock(mutex_);
  if (closed_) return {};
  if (client_->check_open().ok()) {
    KV_TRY(client_->streams().wait());
    // Memory first, ledger second: what is resident never exceeds what is charged.
    KV_TRY(give_pages_back());
    KV_TRY(client_->release_static(region_->bytes()));
  }
  closed_ = true;
  return {};
}

}  // namespace kvcached
