// What a KV cache keeps mapped or created without need, and when that goes.
#include <algorithm>

#include "page_move_lock.h"

namespace kvcached {

namespace {

// Of the client's thread: an alloc that has to map something waits for no more than that.
constexpr size_t kBatchPages = 64;

// Kept mapped on a GPU unless the cache's user says otherwise: what a decode step takes at once,
// and what the thread maps while some steps pass, and no more than such a part of the device.
constexpr uint64_t kReadyBytes = 128 << 20;
constexpr uint64_t kReadySlabs = 2;
constexpr uint64_t kReadyPart = 32;

}  // namespace

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

Status KvCache::keep_ready() {
  if (!client_->vmm()->location().on_gpu || !client_->spares().is_allowed()) return {};
  const uint64_t slab_bytes = pages_per_slab_ * page_bytes_;
  const uint64_t wanted = std::max(kReadySlabs, (kReadyBytes + slab_bytes - 1) / slab_bytes);
  const uint64_t most = client_->ledger()->capacity_bytes() / kReadyPart / slab_bytes;
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

// A fence that the client's thread makes is later than one that the freeing thread would have made,
// so that it is behind all work on what was freed as well.
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
  (void)let_go(std::move(surplus));
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

Tended KvCache::fill_batch(uint64_t fill_bytes) {
  const size_t room_pages = fill_bytes / page_bytes_;
  size_t slabs = 0;
  {
    const std::lock_guard lock(books_);
    slabs = std::min(missing_spares(), batch_slabs());
  }
  if (slabs > 0) {
    slabs = std::min(slabs, (pool_.spare_pages() + room_pages) / pages_per_slab_);
    if (slabs == 0) return Tended::starved;
    return grow(static_cast<Slab>(slabs), Need::later).ok() ? Tended::more : Tended::starved;
  }
  const size_t pages = std::min(pool_.missing_pages(), kBatchPages);
  if (pages == 0) return Tended::content;
  if (room_pages == 0) return Tended::starved;
  return pool_.fill(std::min(pages, room_pages)).ok() ? Tended::more : Tended::starved;
}

Tended KvCache::tend_spares(const Slack& slack) {
  turned_away_ = true;
  const PageMoveLock moving(*this, std::try_to_lock);
  if (!moving.is_mine() || waiting_ > 0 || !check_open().ok()) return Tended::content;
  turned_away_ = false;
  const uint64_t mapped_before = region_->mapped_pages();
  (void)unmap_passed();
  if (region_->mapped_pages() < mapped_before) return Tended::more;
  std::vector<Slab> slabs = withdraw_batch(slack.scarce);
  if (!slabs.empty()) return let_go(std::move(slabs)).ok() ? Tended::more : Tended::starved;
  if (slack.scarce) (void)pool_.trim(0);
  const Tended left = fill_batch(slack.scarce ? 0 : slack.fill_bytes);
  return quarantined_bytes() > 0 ? std::max(left, Tended::waiting) : left;
}

}  // namespace kvcached
