// The part of KvCache that takes pages away, now or once the streams are done with them.
#include <algorithm>

#include "kv_cache.h"

namespace kvcached {

int64_t KvCache::free_mapped() const {
  const auto resting = static_cast<int64_t>(quarantine_.slabs());
  return blocks_.free_mapped_blocks() + resting * blocks_.blocks_per_slab();
}

uint64_t KvCache::quarantined_bytes() const {
  const std::lock_guard lock(mutex_);
  return quarantine_.slabs() * pages_per_slab_ * page_bytes_;
}

void KvCache::take_back(int64_t blocks) {
  const int64_t missing = blocks - blocks_.free_mapped_blocks();
  if (missing <= 0 || quarantine_.slabs() == 0) return;
  const int64_t per_slab = blocks_.blocks_per_slab();
  blocks_.add_mapped(
      quarantine_.take_back(static_cast<size_t>((missing + per_slab - 1) / per_slab)));
}

Status KvCache::let_go(std::vector<Slab> slabs) {
  if (slabs.empty()) return {};
  Result<Fence> fence = client_->streams().make_fence();
  if (!fence.ok()) return fence.status();
  blocks_.set_aside(slabs);
  quarantine_.add(std::move(fence.value()), std::move(slabs));
  return unmap_passed();
}

Status KvCache::unmap_passed() {
  Result<std::vector<Slab>> slabs = quarantine_.take_passed();
  if (!slabs.ok()) return slabs.status();
  return slabs.value().empty() ? Status{} : shrink(slabs.value());
}

Result<size_t> KvCache::trim_locked() {
  if (Status status = check_open(); !status.ok()) return status;
  const uint64_t held_before = held_pages();
  if (Status status = unmap_passed(); !status.ok()) return status;
  if (Status status = let_go(blocks_.empty_mapped()); !status.ok()) return status;
  Result<size_t> trimmed = pool_.trim(0);
  if (!trimmed.ok()) return trimmed;
  return held_before - held_pages();
}

template <class Lock>
Result<size_t> KvCache::trim_within(Lock lock) {
  const Streams::Clock::time_point deadline = Streams::Clock::now() + client_->streams().max_wait();
  size_t given = 0;
  for (Pause pause;; pause.sleep()) {
    const std::unique_lock<std::mutex> held = lock();
    if (!held) return given;
    const Publisher publisher(*this);
    Result<size_t> trimmed = trim_locked();
    if (!trimmed.ok()) return trimmed;
    given += trimmed.value();
    if (quarantine_.slabs() == 0 || Streams::Clock::now() >= deadline) return given;
  }
}

Result<size_t> KvCache::trim() {
  return trim_within([this] { return std::unique_lock(mutex_); });
}

void KvCache::give_back_spares() {
  (void)trim_within([this] { return std::unique_lock(mutex_, std::try_to_lock); });
}

}  // namespace kvcached
