#include "kv_cache.h"

#include <algorithm>
#include <numeric>

#include "non_copyable.h"

namespace kvcached {

namespace {

// Pages of one batch of the client's thread, which is all that an alloc which must map waits for.
constexpr size_t kBatchPages = 64;

// Spare slabs that a cache on a GPU keeps mapped unless its user sets watermarks: the larger of
// what one decode step takes and what the thread maps during some steps, up to a part of the
// device.
constexpr uint64_t kDefaultSpareBytes = 128 << 20;
constexpr uint64_t kDefaultSpareSlabs = 2;
constexpr uint64_t kDefaultSparePart = 32;

}  // namespace

// Exclusive right to move the cache's pages. The client's thread gives way: it leaves when another
// thread waits, and is woken when the lock is free.
class KvCache::PageMoveLock : private kvcached::NonCopyable {
 public:
  explicit PageMoveLock(KvCache& cache) : cache_(cache) {
    ++cache_.waiting_;
    lock_ = std::unique_lock(cache_.moving_);
    --cache_.waiting_;
  }
  PageMoveLock(KvCache& cache, std::try_to_lock_t how) : cache_(cache), lock_(cache.moving_, how) {}
  ~PageMoveLock() {
    if (!owns_lock()) return;
    {
      const std::lock_guard books(cache_.books_);
      cache_.publish_spares();
    }
    lock_.unlock();
    if (cache_.keeper_turned_away_.exchange(false)) cache_.client_->spares().wake();
  }

  bool owns_lock() const { return lock_.owns_lock(); }

 private:
  KvCache& cache_;
  std::unique_lock<std::mutex> lock_;
};

Result<std::shared_ptr<KvCache>> KvCache::create(std::shared_ptr<Client> client,
                                                 const KvGeometry& geometry) {
  KV_ASSIGN(uint64_t bytes, region_bytes(geometry, client->page_bytes()));
  KV_ASSIGN(std::shared_ptr<Region> region, client->reserve_region(bytes));
  KV_TRY(client->vmm()->cover(region->address(), bytes));
  std::shared_ptr<KvCache> cache(new KvCache(std::move(client), std::move(region), geometry));
  cache->client_->spares().add(cache.get());
  if (const Slab floor = cache->blocks_.floor_slabs(); floor > 0) {
    const PageMoveLock moving(*cache);
    KV_TRY(cache->grow(floor, Need::now));
    KV_TRY(cache->zero_reserved());
  }
  KV_TRY(cache->set_default_spares());
  return cache;
}

Status KvCache::zero_reserved() {
  if (client_->vmm()->makes_zeros()) return {};
  std::vector<Slab> slabs(blocks_.floor_slabs());
  std::iota(slabs.begin(), slabs.end(), Slab{0});
  for (const PageRun& run : layout_.runs_of(slabs)) {
    const uint64_t address = region_->address() + run.first_page * page_bytes_;
    KV_TRY(client_->vmm()->fill(address, run.pages * page_bytes_, 0));
  }
  return {};
}

KvCache::KvCache(std::shared_ptr<Client> client, std::shared_ptr<Region> region,
                 const KvGeometry& geometry)
    : client_(std::move(client)),
      region_(std::move(region)),
      layout_(geometry.slab_pages, geometry.slabs),
      page_bytes_(client_->page_bytes()),
      pages_per_slab_(layout_.pages_per_slab()),
      pool_(client_, this),
      blocks_(geometry.slabs, geometry.blocks_per_slab, geometry.reserved_blocks) {}

KvCache::~KvCache() {
  client_->spares().remove(this);
  // What a failure leaves mapped is given back when the client closes.
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

void KvCache::count_calls(const MapCounters& before) {
  const MapCounters& now = region_->counters();
  client_->count_maps(now.maps - before.maps, now.unmaps - before.unmaps);
}

Status KvCache::map(std::span<const Slab> slabs, std::span<const Handle> pages) {
  const MapCounters before = region_->counters();
  Status mapped = region_->map(layout_.runs_of(slabs), pages);
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
  // A call that needs slabs which are just being unmapped takes moving_ and counts again then.
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
    // Other threads may have mapped slabs or taken blocks meanwhile.
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
  // Stranded slabs may be in one count and not in the other.
  const uint64_t pages = (blocks_.mapped_slabs() + quarantine_.slabs()) * pages_per_slab_;
  if (blocks_.retired_slabs() > 0 || region_->mapped_pages() == pages) return {};
  return failure(Code::internal, region_->mapped_pages(), " pages are mapped, but the books have ",
                 pages);
}

// --- pages that go, now or once the streams are done with them ---

int64_t KvCache::free_mapped() const {
  const auto quarantined = static_cast<int64_t>(quarantine_.slabs());
  return blocks_.free_mapped_blocks() + quarantined * blocks_.blocks_per_slab();
}

uint64_t KvCache::quarantined_bytes() const {
  const std::lock_guard lock(books_);
  return quarantine_.slabs() * pages_per_slab_ * page_bytes_;
}

void KvCache::take_back(int64_t blocks) {
  const int64_t missing = blocks - blocks_.free_mapped_blocks();
  if (missing <= 0 || quarantine_.slabs() == 0) return;
  const int64_t per_slab = blocks_.blocks_per_slab();
  blocks_.add_mapped(
      quarantine_.take_back(static_cast<size_t>((missing + per_slab - 1) / per_slab)));
}

std::vector<Slab> KvCache::withdraw(size_t keep, size_t count) {
  // Keeps the lowest slabs, so that mapped memory stays in few runs.
  std::vector<Slab> slabs = blocks_.empty_mapped();
  const size_t excess = slabs.size() - std::min(slabs.size(), keep);
  slabs.erase(slabs.begin(), slabs.end() - static_cast<std::ptrdiff_t>(std::min(excess, count)));
  blocks_.set_aside(slabs);
  slabs_being_unmapped_ = static_cast<Slab>(slabs.size());
  return slabs;
}

Status KvCache::unmap_after_fence(std::vector<Slab> withdrawn) {
  if (withdrawn.empty()) return {};
  Result<Fence> fence = client_->streams().make_fence();
  {
    const std::lock_guard lock(books_);
    slabs_being_unmapped_ = 0;
    if (!fence.ok()) {
      blocks_.add_mapped(withdrawn);
      return fence.status();
    }
    quarantine_.add(std::move(fence.value()), std::move(withdrawn));
  }
  return unmap_passed();
}

Status KvCache::unmap_passed() {
  std::vector<Slab> passed;
  {
    const std::lock_guard lock(books_);
    if (quarantine_.slabs() == 0) return {};
    KV_ASSIGN(passed, quarantine_.take_passed());
    slabs_being_unmapped_ = static_cast<Slab>(passed.size());
  }
  return passed.empty() ? Status{} : shrink(passed);
}

Status KvCache::shrink(std::span<const Slab> withdrawn) {
  const MapCounters before = region_->counters();
  Result<std::vector<Handle>> pages = region_->unmap(layout_.runs_of(withdrawn));
  count_calls(before);
  const Status outcome = pages.ok() ? pool_.give(pages.value()) : pages.status();
  const std::lock_guard lock(books_);
  slabs_being_unmapped_ = 0;
  if (pages.ok()) {
    blocks_.remove_mapped(withdrawn);
  } else if (outcome.code == Code::stranded) {
    blocks_.retire(withdrawn);
  } else {
    blocks_.add_mapped(withdrawn);
  }
  return outcome;
}

Result<size_t> KvCache::trim_locked() {
  KV_TRY(check_open());
  const uint64_t held_before = held_pages();
  KV_TRY(unmap_passed());
  std::vector<Slab> empty;
  {
    const std::lock_guard lock(books_);
    empty = withdraw(0, blocks_.empty_slabs());
  }
  KV_TRY(unmap_after_fence(std::move(empty)));
  if (Result<size_t> trimmed = pool_.trim(0); !trimmed.ok()) return trimmed;
  return held_before - held_pages();
}

template <class TakeLock>
Result<size_t> KvCache::trim_within(TakeLock take_lock) {
  const Streams::Clock::time_point deadline = Streams::Clock::now() + client_->streams().max_wait();
  size_t given = 0;
  for (Pause pause;; pause.sleep()) {
    const PageMoveLock moving = take_lock();
    if (!moving.owns_lock()) return given;
    KV_ASSIGN(size_t trimmed, trim_locked());
    given += trimmed;
    const std::lock_guard lock(books_);
    if (quarantine_.slabs() == 0 || Streams::Clock::now() >= deadline) return given;
  }
}

Result<size_t> KvCache::trim() {
  client_->spares().report_pressure();
  return trim_within([this] { return PageMoveLock(*this); });
}

void KvCache::give_back_spares() {
  (void)trim_within([this] { return PageMoveLock(*this, std::try_to_lock); });
}

// --- spare pages ---

void KvCache::publish_spares() {
  const uint64_t slabs = blocks_.empty_slabs() + quarantine_.slabs();
  const uint64_t pages = pool_.spare_pages() + slabs * pages_per_slab_;
  const uint64_t bytes = closed_ ? 0 : pages * page_bytes_;
  if (bytes == published_spare_bytes_) return;
  client_->add_spare(static_cast<int64_t>(bytes - published_spare_bytes_));
  published_spare_bytes_ = bytes;
}

size_t KvCache::batch_slabs() const { return std::max<size_t>(1, kBatchPages / pages_per_slab_); }

size_t KvCache::missing_spares() const {
  const size_t missing = low_slabs_ - std::min<size_t>(low_slabs_, blocks_.empty_slabs());
  return std::min<size_t>(missing, blocks_.unmapped_slabs());
}

Status KvCache::set_mapped_spares(size_t low_pages, size_t high_pages) {
  KV_TRY(check_open());
  KV_TRY(check_watermarks(low_pages, high_pages));
  if (low_pages > 0) KV_TRY(client_->spares().start());
  {
    const std::lock_guard lock(books_);
    low_slabs_ = low_pages / pages_per_slab_;
    high_slabs_ = high_pages / pages_per_slab_;
  }
  client_->spares().wake();
  settle();
  return {};
}

Status KvCache::set_default_spares() {
  if (!client_->vmm()->location().on_gpu || !client_->spares().is_allowed()) return {};
  const uint64_t slab_bytes = pages_per_slab_ * page_bytes_;
  const uint64_t wanted =
      std::max(kDefaultSpareSlabs, (kDefaultSpareBytes + slab_bytes - 1) / slab_bytes);
  const uint64_t most = client_->ledger()->capacity_bytes() / kDefaultSparePart / slab_bytes;
  const size_t low_pages = std::min(wanted, most) * pages_per_slab_;
  return low_pages == 0 ? Status{} : set_mapped_spares(low_pages, 2 * low_pages);
}

Status KvCache::set_spare_pages(size_t low, size_t high) {
  KV_TRY(check_open());
  KV_TRY(check_watermarks(low, high));
  if (low > 0) KV_TRY(client_->spares().start());
  const PageMoveLock moving(*this);
  Status status = pool_.set_watermarks(low, high);
  client_->spares().wake();
  return status;
}

Result<size_t> KvCache::refill() {
  const PageMoveLock moving(*this);
  KV_TRY(check_open());
  KV_ASSIGN(uint64_t room_bytes, client_->available());
  const size_t pages = pool_.spare_pages() + room_bytes / page_bytes_;
  size_t count = 0;
  {
    const std::lock_guard lock(books_);
    count = std::min(missing_spares(), pages / pages_per_slab_);
  }
  if (count == 0) return size_t{0};
  const Status status = grow(static_cast<Slab>(count), Need::later);
  if (status.code == Code::no_room) return size_t{0};
  if (!status.ok()) return status;
  return count * pages_per_slab_;
}

// The client's thread makes its fence later than the freeing thread would have, so that fence too
// comes after all work on the freed blocks.
void KvCache::settle() {
  if (client_->spares().runs()) return client_->spares().wake();
  const PageMoveLock moving(*this);
  if (check_open().ok()) settle_locked();
}

void KvCache::settle_locked() {
  (void)unmap_passed();
  std::vector<Slab> surplus;
  {
    const std::lock_guard lock(books_);
    if (blocks_.empty_slabs() <= high_slabs_) return;
    surplus = withdraw(low_slabs_, blocks_.empty_slabs());
  }
  (void)unmap_after_fence(std::move(surplus));
}

size_t KvCache::spare_pages() {
  const std::lock_guard lock(books_);
  if (!check_open().ok()) return 0;
  const size_t slabs = blocks_.empty_slabs() + quarantine_.slabs();
  return slabs * pages_per_slab_ + pool_.spare_pages();
}

std::vector<Slab> KvCache::withdraw_batch(bool all) {
  const std::lock_guard lock(books_);
  const size_t empty = blocks_.empty_slabs();
  draining_ = empty > high_slabs_ || (draining_ && empty > low_slabs_);
  if (all) return withdraw(0, batch_slabs());
  return draining_ ? withdraw(low_slabs_, batch_slabs()) : std::vector<Slab>{};
}

SpareWork KvCache::fill_batch(uint64_t fill_bytes) {
  const size_t room_pages = fill_bytes / page_bytes_;
  size_t slabs = 0;
  {
    const std::lock_guard lock(books_);
    slabs = std::min(missing_spares(), batch_slabs());
  }
  if (slabs > 0) {
    slabs = std::min(slabs, (pool_.spare_pages() + room_pages) / pages_per_slab_);
    if (slabs == 0) return SpareWork::no_room;
    return grow(static_cast<Slab>(slabs), Need::later).ok() ? SpareWork::more : SpareWork::no_room;
  }
  const size_t pages = std::min(pool_.missing_pages(), kBatchPages);
  if (pages == 0) return SpareWork::done;
  if (room_pages == 0) return SpareWork::no_room;
  return pool_.fill(std::min(pages, room_pages)).ok() ? SpareWork::more : SpareWork::no_room;
}

SpareWork KvCache::balance_spares(const Slack& slack) {
  keeper_turned_away_ = true;
  const PageMoveLock moving(*this, std::try_to_lock);
  if (!moving.owns_lock() || waiting_ > 0 || !check_open().ok()) return SpareWork::done;
  keeper_turned_away_ = false;
  const uint64_t mapped_before = region_->mapped_pages();
  (void)unmap_passed();
  if (region_->mapped_pages() < mapped_before) return SpareWork::more;
  std::vector<Slab> slabs = withdraw_batch(slack.scarce);
  if (!slabs.empty())
    return unmap_after_fence(std::move(slabs)).ok() ? SpareWork::more : SpareWork::no_room;
  if (slack.scarce) (void)pool_.trim(0);
  const SpareWork left = fill_batch(slack.scarce ? 0 : slack.fill_bytes);
  return quarantined_bytes() > 0 ? std::max(left, SpareWork::fenced) : left;
}

// --- pages that other processes read, and copies of theirs ---

Result<SharedPages> KvCache::export_pages(std::span<const uint64_t> pages) {
  const PageMoveLock moving(*this);
  KV_TRY(check_open());
  KV_ASSIGN(std::vector<Handle> handles, region_->backing(pages));
  return client_->vmm()->export_pages(handles);
}

Status KvCache::copy_in(PageWindow& window, std::span<const CopyRun> runs) {
  KV_TRY(client_->streams().wait());
  const PageMoveLock moving(*this);
  KV_TRY(check_open());
  KV_ASSIGN(std::vector<CopyRun> located, region_->locate(runs));
  return window.copy(located);
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
  (void)pool_.give(pages.value());  // a failure is tried again when the pool is emptied
  return {};
}

}  // namespace kvcached
