// The part of KvCache that takes pages away, now or once the streams are done with them.
#include <algorithm>

#include "page_move_lock.h"

namespace kvcached {

int64_t KvCache::free_mapped() const {
  const auto resting = static_cast<int64_t>(quarantine_.slabs());
  return blocks_.free_mapped_blocks() + resting * blocks_.blocks_per_slab();
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
  // The low ones stay, so that what is mapped lies together.
  std::vector<Slab> slabs = blocks_.empty_mapped();
  const size_t excess = slabs.size() - std::min(slabs.size(), keep);
  slabs.erase(slabs.begin(), slabs.end() - static_cast<std::ptrdiff_t>(std::min(excess, count)));
  blocks_.set_aside(slabs);
  slabs_being_unmapped_ = static_cast<Slab>(slabs.size());
  return slabs;
}

Status KvCache::let_go(std::vector<Slab> withdrawn) {
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
  Result<std::vector<Handle>> pages = region_->unmap(runs_of(withdrawn));
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
  KV_TRY(let_go(std::move(empty)));
  if (Result<size_t> trimmed = pool_.trim(0); !trimmed.ok()) return trimmed;
  return held_before - held_pages();
}

template <class TakeLock>
Result<size_t> KvCache::trim_within(TakeLock take_lock) {
  const Streams::Clock::time_point deadline = Streams::Clock::now() + client_->streams().max_wait();
  size_t given = 0;
  for (Pause pause;; pause.sleep()) {
    const PageMoveLock moving = take_lock();
    if (!moving.is_mine()) return given;
    KV_ASSIGN(size_t trimmed, trim_locked());
    given += trimmed;
    const std::lock_guard lock(books_);
    if (quarantine_.slabs() == 0 || Streams::Clock::now() >= deadline) return given;
  }
}

Result<size_t> KvCache::trim() {
  client_->spares().press();
  return trim_within([this] { return PageMoveLock(*this); });
}

void KvCache::give_back_spares() {
  (void)trim_within([this] { return PageMoveLock(*this, std::try_to_lock); });
}

}  // namespace kvcached
