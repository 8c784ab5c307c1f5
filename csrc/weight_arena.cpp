#include "weight_arena.h"

#include <algorithm>

namespace kvcached {

namespace {

// Pages of one driver allocation. They are freed together anyway.
constexpr uint64_t kBlockBytes = 64 << 20;

}  // namespace

Result<std::shared_ptr<WeightArena>> WeightArena::create(std::shared_ptr<Client> client,
                                                         uint64_t bytes) {
  KV_TRY(client->check_open());
  const uint64_t page = client->page_bytes();
  if (bytes == 0 || bytes > UINT64_MAX - page) {
    return failure(Code::invalid_argument, "an arena cannot have ", bytes, " bytes");
  }
  KV_ASSIGN(std::shared_ptr<Region> region,
            client->reserve_region((bytes + page - 1) / page * page));
  KV_TRY(client->reserve_static(region->bytes()));
  return std::shared_ptr<WeightArena>(new WeightArena(std::move(client), std::move(region)));
}

WeightArena::WeightArena(std::shared_ptr<Client> client, std::shared_ptr<Region> region)
    : client_(std::move(client)), region_(std::move(region)) {}

WeightArena::~WeightArena() {
  // What a failure leaves mapped is given back when the client closes.
  (void)close();
}

uint64_t WeightArena::backed_bytes() const {
  return region_->mapped_pages() * client_->page_bytes();
}

Status WeightArena::back(uint64_t bytes, uint64_t ahead_bytes) {
  // A lane whose bytes are backed does not wait for one that creates more.
  if (bytes > 0 && bytes <= backed_bytes()) return client_->check_open();
  const std::lock_guard lock(mutex_);
  KV_TRY(check_usable());
  if (bytes > region_->bytes()) {
    return failure(Code::invalid_argument, "the arena has ", region_->bytes(), " bytes, not ",
                   bytes);
  }
  const uint64_t page = client_->page_bytes();
  const uint64_t backed = backed_bytes();
  // A second failed release would lose the pages of the first.
  if (!unreleased_.empty())
    return failure(Code::stranded, "pages could not be released; free the arena");
  if (bytes <= backed) return {};
  const uint64_t end = bytes + std::min(ahead_bytes, region_->bytes() - bytes);
  const uint64_t wanted_pages = (end + page - 1) / page;
  const uint64_t block_pages = std::max<uint64_t>(1, kBlockBytes / page);
  while (region_->mapped_pages() < wanted_pages) {
    KV_TRY(grow(std::min(block_pages, wanted_pages - region_->mapped_pages())));
  }
  return {};
}

Status WeightArena::check_usable() const {
  if (closed_) return failure(Code::closed, "the arena was freed");
  return client_->check_open();
}

Status WeightArena::fill(unsigned char value) {
  KV_TRY(back(bytes()));
  const std::lock_guard lock(mutex_);
  KV_TRY(check_usable());
  return client_->vmm()->fill(region_->address(), region_->bytes(), value);
}

Status WeightArena::grow(uint64_t pages) {
  KV_ASSIGN(std::vector<Handle> handles, client_->create_block(pages));
  const PageRun run = {region_->mapped_pages(), pages};
  Status mapped = region_->map(std::span(&run, 1), handles);
  if (mapped.ok()) {
    client_->count_maps(1, 0);
  } else if (mapped.code != Code::stranded) {
    if (!client_->vmm()->release(handles).ok()) unreleased_ = std::move(handles);
  }
  return mapped;
}

Status WeightArena::give_pages_back() {
  KV_ASSIGN(std::vector<Handle> handles, region_->unmap_all());
  if (!handles.empty()) client_->count_maps(0, 1);
  unreleased_.insert(unreleased_.end(), handles.begin(), handles.end());
  if (unreleased_.empty()) return {};
  KV_TRY(client_->vmm()->release(unreleased_));
  unreleased_.clear();
  return {};
}

Status WeightArena::close() {
  const std::lock_guard lock(mutex_);
  if (closed_) return {};
  if (client_->check_open().ok()) {
    KV_TRY(client_->streams().wait());
    // Memory first, ledger second, so that resident memory never exceeds the charges.
    KV_TRY(give_pages_back());
    KV_TRY(client_->release_static(region_->bytes()));
  }
  closed_ = true;
  return {};
}

}  // namespace kvcached
