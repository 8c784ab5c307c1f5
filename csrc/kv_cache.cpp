#include <algorithm>
#include <numeric>

#include "page_move_lock.h"

namespace kvcached {

namespace {

Status check_geometry(const KvGeometry& geometry) {
  const int64_t blocks = int64_t{geometry.slabs} * geometry.blocks_per_slab;
  if (blocks == 0 || geometry.slab_pages.empty() ||
      std::count(geometry.slab_pages.begin(), geometry.slab_pages.end(), 0) != 0) {
    return failure(Code::invalid_argument, "a KV cache needs buffers, slabs and blocks");
  }
  if (geometry.reserved_blocks < 0 || geometry.reserved_blocks >= blocks) {
    return failure(Code::invalid_argument, "reserved_blocks must be at least 0 and below the ",
                   blocks, " blocks of the cache");
  }
  return {};
}

uint64_t sum(const std::vector<uint64_t>& values) {
  return std::accumulate(values.begin(), values.end(), uint64_t{0});
}

}  // namespace

void KvCache::publish_spares() {
  const uint64_t slabs = blocks_.empty_slabs() + quarantine_.slabs();
  const uint64_t pages = pool_.spare_pages() + slabs * pages_per_slab_;
  const uint64_t bytes = closed_ ? 0 : pages * page_bytes_;
  if (bytes == published_spare_bytes_) return;
  client_->add_spare(static_cast<int64_t>(bytes - published_spare_bytes_));
  published_spare_bytes_ = bytes;
}

Result<std::shared_ptr<KvCache>> KvCache::create(std::shared_ptr<Client> client,
                                                 KvGeometry geometry) {
  KV_TRY(check_geometry(geometry));
  uint64_t bytes = 0;
  if (__builtin_mul_overflow(sum(geometry.slab_pages) * client->page_bytes(),
                             uint64_t{geometry.slabs}, &bytes)) {
    return failure(Code::invalid_argument, "the KV cache exceeds the address space");
  }
  KV_ASSIGN(std::shared_ptr<Region> region, client->reserve_region(bytes));
  KV_TRY(client->vmm()->cover(region->address(), bytes));
  std::shared_ptr<KvCache> cache(
      new KvCache(std::move(client), std::move(region), std::move(geometry)));
  cache->client_->spares().add(cache.get());
  if (const Slab floor = cache->blocks_.floor_slabs(); floor > 0) {
    const PageMoveLock moving(*cache);
    KV_TRY(cache->grow(floor, Need::now));
    KV_TRY(cache->zero_reserved());
  }
  KV_TRY(cache->keep_ready());
  return cache;
}

Status KvCache::zero_reserved() {
  if (client_->vmm()->makes_zeros()) return {};
  std::vector<Slab> slabs(blocks_.floor_slabs());
  std::iota(slabs.begin(), slabs.end(), Slab{0});
  for (const PageRun& run : runs_of(slabs)) {
    const uint64_t address = region_->address() + run.first_page * page_bytes_;
    KV_TRY(client_->vmm()->fill(address, run.pages * page_bytes_, 0));
  }
  return {};
}

KvCache::KvCache(std::shared_ptr<Client> client, std::shared_ptr<Region> region,
                 KvGeometry geometry)
    : client_(std::move(client)),
      region_(std::move(region)),
      geometry_(std::move(geometry)),
      page_bytes_(client_->page_bytes()),
      pages_per_slab_(sum(geometry_.slab_pages)),
      pool_(client_, this),
      blocks_(geometry_.slabs, geometry_.blocks_per_slab, geometry_.reserved_blocks) {
  uint64_t first_page = 0;
  for (const uint64_t pages : geometry_.slab_pages) {
    buffer_pages_.push_back(first_page);
    first_page += pages * geometry_.slabs;
  }
}

KvCache::~KvCache() {
  client_->spares().remove(this);
  // What a failure leaves behind is given back when the client closes.
  (void)close();
}

Status KvCache::check_viewable() const {
  const std::lock_guard lock(books_);
  return closed_ ? failure(Code::closed, "the KV cache was freed") : Status{};
}

Status KvCache::check_open() const {
  if (closed_) return failure(Code::closed, "the KV cache was freed");
  return client_->check_open();
}

std::vector<PageRun> KvCache::runs_of(std::span<const Slab> slabs) const {
  std::vector<PageRun> runs;
  for (size_t first = 0; first < slabs.size();) {
    size_t end = first + 1;
    while (end < slabs.size() && slabs[end] == slabs[end - 1] + 1) ++end;
    for (size_t buffer = 0; buffer < buffer_pages_.size(); ++buffer) {
      const uint64_t pages = geometry_.slab_pages[buffer];
      runs.push_back({buffer_pages_[buffer] + slabs[first] * pages, (end - first) * pages});
    }
    first = end;
  }
  return runs;
}

void KvCache::count_calls(const MapCounters& before) {
  const MapCounters& now = region_->counters();
  client_->count_maps(now.maps - before.maps, now.unmaps - before.unmaps);
}

Status KvCache::map(std::span<const Slab> slabs, std::span<const Handle> pages) {
  const MapCounters before = region_->counters();
  Status mapped = region_->map(runs_of(slabs), pages);
  count_calls(before);
  return mapped;
}

Status KvCache::grow(Slab count, Need need) {
  std::vector<Slab> slabs;
  {
    const std::lock_guard lock(books_);
    slabs = blocks_.lowest_unmapped(count);
    slabs_being_mapped_ = count;
  }
  const size_t needed = count * pages_per_slab_;
  Result<std::vector<Handle>> pages =
      need == Need::now ? pool_.take(needed) : pool_.take_ahead(needed);
  Status mapped = pages.ok() ? map(slabs, pages.value()) : pages.status();
  const bool unused = pages.ok() && !mapped.ok() && mapped.code != Code::stranded;
  const Status given = unused ? pool_.give(pages.value()) : Status{};
  const std::lock_guard lock(books_);
  slabs_being_mapped_ = 0;
  if (mapped.ok()) blocks_.add_mapped(slabs);
  if (mapped.code == Code::stranded) blocks_.retire(slabs);
  return given.ok() ? mapped : given;
}

Result<Slab> KvCache::missing_slabs(int64_t blocks) const {
  const int64_t missing = blocks - free_mapped();
  if (missing <= 0) return Slab{0};
  const int64_t per_slab = blocks_.blocks_per_slab();
  const int64_t slabs = missing / per_slab + (missing % per_slab != 0 ? 1 : 0);
  // Whoever needs slabs that are just being unmapped takes moving_, and counts again behind that.
  const int64_t unmapped = int64_t{blocks_.unmapped_slabs()} + slabs_being_unmapped_;
  if (slabs <= unmapped) return static_cast<Slab>(slabs);
  return failure(Code::no_room, "the virtual space of the KV cache is used up");
}

Result<Slab> KvCache::take_or_count_missing(std::span<int64_t> ids) {
  const std::lock_guard lock(books_);
  KV_TRY(check_open());
  Result<Slab> missing = missing_slabs(static_cast<int64_t>(ids.size()));
  if (missing.ok() && missing.value() == 0) take(ids);
  return missing;
}

void KvCache::take(std::span<int64_t> ids) {
  take_back(static_cast<int64_t>(ids.size()));
  blocks_.take(ids);
  client_->touch();
  publish_spares();
  if (blocks_.empty_slabs() < low_slabs_) client_->spares().wake_to_fill();
}

Status KvCache::alloc(std::span<int64_t> ids) {
  Result<Slab> missing = take_or_count_missing(ids);
  if (!missing.ok()) return missing.status();
  if (missing.value() == 0) return {};
  const PageMoveLock moving(*this);
  for (;;) {
    // Others may have mapped slabs since, or taken blocks.
    missing = take_or_count_missing(ids);
    if (!missing.ok()) return missing.status();
    if (missing.value() == 0) return {};
    KV_TRY(grow(missing.value(), Need::now));
  }
}

Status KvCache::free(std::span<const int64_t> ids) {
  {
    const std::lock_guard lock(books_);
    KV_TRY(check_open());
    KV_TRY(blocks_.give(ids));
    publish_spares();
    if (!has_surplus()) return {};
  }
  settle();
  return {};
}

Result<size_t> KvCache::missing_pages(int64_t blocks) const {
  const std::lock_guard lock(books_);
  KV_TRY(check_open());
  KV_ASSIGN(Slab slabs, missing_slabs(blocks));
  const size_t pages = slabs * pages_per_slab_;
  return pages - std::min(pages, pool_.spare_pages());
}

Status KvCache::check_free(std::span<const int64_t> ids) {
  const std::lock_guard lock(books_);
  KV_TRY(check_open());
  return blocks_.check_give(ids);
}

Status KvCache::find_room(size_t pages) {
  const PageMoveLock moving(*this);
  KV_TRY(check_open());
  return pool_.find_room(pages);
}

bool KvCache::try_alloc(std::span<int64_t> ids) {
  const std::unique_lock lock(books_, std::try_to_lock);
  if (!lock || !check_open().ok()) return false;
  if (static_cast<int64_t>(ids.size()) > blocks_.free_mapped_blocks()) return false;
  take(ids);
  return true;
}

TryFree KvCache::try_free(std::span<const int64_t> ids) {
  const std::unique_lock lock(books_, std::try_to_lock);
  if (!lock || !check_open().ok() || !blocks_.give(ids).ok()) return TryFree::nothing;
  publish_spares();
  return has_surplus() ? TryFree::freed_with_surplus : TryFree::freed;
}

Result<int64_t> KvCache::available_blocks() {
  int64_t mapped = 0;
  uint64_t unmapped = 0;
  uint64_t between = 0;
  {
    const std::lock_guard lock(books_);
    KV_TRY(check_open());
    mapped = free_mapped();
    unmapped = blocks_.unmapped_slabs() + slabs_being_unmapped_;
    between = slabs_being_mapped_ + slabs_being_unmapped_;
  }
  KV_ASSIGN(size_t pages, pool_.available_pages());
  const uint64_t slabs = std::min(unmapped, between + pages / pages_per_slab_);
  return mapped + static_cast<int64_t>(slabs) * blocks_.blocks_per_slab();
}

int64_t KvCache::live_blocks() const {
  const std::lock_guard lock(books_);
  return blocks_.live_blocks();
}

Result<bool> KvCache::can_alloc(int64_t blocks) {
  {
    const std::lock_guard lock(books_);
    KV_TRY(check_open());
    if (blocks <= free_mapped()) return true;
  }
  KV_ASSIGN(int64_t available, available_blocks());
  return blocks <= available;
}

int64_t KvCache::free_mapped_blocks() const {
  const std::lock_guard lock(books_);
  return free_mapped();
}

uint64_t KvCache::mapped_bytes() const { return region_->mapped_pages() * page_bytes_; }

uint64_t KvCache::needed_bytes() const {
  const std::lock_guard lock(books_);
  return blocks_.needed_slabs() * pages_per_slab_ * page_bytes_;
}

uint64_t KvCache::floor_bytes() const {
  return blocks_.floor_slabs() * pages_per_slab_ * page_bytes_;
}

MapCounters KvCache::counters() {
  const PageMoveLock moving(*this);
  return region_->counters();
}

Result<Eviction> KvCache::choose_evictions(std::span<const int64_t> ids,
                                           std::span<const int64_t> last_used,
                                           uint64_t bytes) const {
  const std::lock_guard lock(books_);
  KV_TRY(check_open());
  const uint64_t slab_bytes = pages_per_slab_ * page_bytes_;
  const uint64_t slabs = bytes / slab_bytes + (bytes % slab_bytes != 0 ? 1 : 0);
  Result<Eviction> chosen = kvcached::choose_evictions(blocks_, ids, last_used, slabs);
  if (chosen.ok()) chosen.value().freed_bytes = chosen.value().slabs * slab_bytes;
  return chosen;
}

Status KvCache::check() {
  const PageMoveLock moving(*this);
  const std::lock_guard lock(books_);
  KV_TRY(check_open());
  KV_TRY(blocks_.check());
  // What a failure stranded is in neither count for sure.
  const uint64_t pages = (blocks_.mapped_slabs() + quarantine_.slabs()) * pages_per_slab_;
  if (blocks_.retired_slabs() > 0 || region_->mapped_pages() == pages) return {};
  return failure(Code::internal, region_->mapped_pages(), " pages are mapped, ", pages,
                 " in the books");
}

Status KvCache::close() {
  const PageMoveLock moving(*this);
  if (!client_->check_open().ok()) {
    closed_ = true;
    return {};
  }
  if (!closed_) KV_TRY(unmap_all());
  return pool_.set_watermarks(0, 0);
}

Status KvCache::unmap_all() {
  KV_TRY(client_->streams().wait());
  {
    const std::lock_guard lock(books_);
    blocks_.add_mapped(quarantine_.take_back(quarantine_.slabs()));
  }
  const MapCounters before = region_->counters();
  Result<std::vector<Handle>> pages = region_->unmap_all();
  count_calls(before);
  if (!pages.ok()) return pages.status();
  closed_ = true;
  (void)pool_.give(pages.value());  // what fails here is tried again with the last of the pool
  return {};
}

}  // namespace kvcached
