#include "page_pool.h"

#include <algorithm>

namespace kvcached {

Status check_watermarks(size_t low, size_t high) {
  if (low <= high) return {};
  return failure(Code::invalid_argument, "the low watermark is above the high one; swap them");
}

void PagePool::add_spares(std::span<const Handle> handles) {
  const auto old = static_cast<std::ptrdiff_t>(spares_.size());
  spares_.insert(spares_.end(), handles.begin(), handles.end());
  std::sort(spares_.begin() + old, spares_.end());
  std::inplace_merge(spares_.begin(), spares_.begin() + old, spares_.end());
  spare_count_ = spares_.size();
}

std::vector<Handle> PagePool::remove_spares(size_t count, bool longest) {
  std::vector<std::span<Handle>> runs;
  for (size_t first = 0, end = 0; first < spares_.size(); first = end) {
    for (end = first + 1; end < spares_.size() && spares_[end] == spares_[end - 1] + 1;) ++end;
    runs.push_back(std::span(spares_).subspan(first, end - first));
  }
  std::stable_sort(runs.begin(), runs.end(), [longest](const auto& a, const auto& b) {
    return longest ? a.size() > b.size() : a.size() < b.size();
  });
  std::vector<Handle> removed;
  for (size_t i = 0; removed.size() < count; ++i) {
    const auto part = runs[i].first(std::min(runs[i].size(), count - removed.size()));
    removed.insert(removed.end(), part.begin(), part.end());
    std::fill(part.begin(), part.end(), kNoHandle);
  }
  std::erase(spares_, kNoHandle);
  spare_count_ = spares_.size();
  std::sort(removed.begin(), removed.end());
  return removed;
}

Status PagePool::reserve(uint64_t bytes, Need need) {
  Status status = client_->reserve(bytes);
  if (status.code != Code::no_room || need == Need::later) return status;
  client_->spares().give_back(owner_);
  return client_->reserve(bytes);
}

Result<std::vector<Handle>> PagePool::create(size_t count, Need need) {
  const uint64_t bytes = count * client_->page_bytes();
  KV_TRY(reserve(bytes, need));
  // A page that is made ahead of need does not wait for a device that is full in spite of the
  // ledger.
  Result<std::vector<Handle>> handles =
      need == Need::now ? client_->create_pages(count) : client_->vmm()->create(count);
  Status outcome = handles.ok() ? client_->commit(bytes) : handles.status();
  if (outcome.ok()) return handles;
  if (handles.ok()) (void)client_->vmm()->release(handles.value());
  KV_TRY(client_->cancel(bytes));
  return outcome;
}

Status PagePool::find_room(size_t count) {
  uint64_t bytes = 0;
  if (__builtin_mul_overflow(count, client_->page_bytes(), &bytes)) bytes = UINT64_MAX;
  KV_TRY(reserve(bytes, Need::now));
  return client_->cancel(bytes);
}

Result<std::vector<Handle>> PagePool::take_as(size_t count, Need need) {
  const size_t reused = std::min(count, spares_.size());
  std::vector<Handle> handles;
  if (count > reused) {
    KV_ASSIGN(handles, create(count - reused, need));
  }
  const std::vector<Handle> spares = remove_spares(reused, true);
  handles.insert(handles.begin(), spares.begin(), spares.end());
  return handles;
}

Status PagePool::fill(size_t count) {
  KV_ASSIGN(std::vector<Handle> created, create(count, Need::later));
  add_spares(created);
  return {};
}

Status PagePool::give(std::span<const Handle> handles) {
  add_spares(handles);
  return keep_below_high();
}

Result<size_t> PagePool::trim(size_t keep) {
  if (spares_.size() <= keep) return size_t{0};
  const std::vector<Handle> excess = remove_spares(spares_.size() - keep, false);
  // Memory first, ledger second, so that resident memory never exceeds the charges.
  if (Status status = client_->vmm()->release(excess); !status.ok()) {
    add_spares(excess);
    return status;
  }
  const uint64_t bytes = excess.size() * client_->page_bytes();
  KV_TRY(client_->release(bytes));
  return excess.size();
}

Status PagePool::set_watermarks(size_t low, size_t high) {
  low_ = low;
  high_ = high;
  return keep_below_high();
}

Status PagePool::keep_below_high() {
  if (spares_.size() <= high_) return {};
  const Result<size_t> trimmed = trim(low_);
  return trimmed.ok() ? Status{} : trimmed.status();
}

Result<size_t> PagePool::available_pages() {
  const size_t own = spare_count_;
  const uint64_t page = client_->page_bytes();
  KV_ASSIGN(uint64_t bytes, client_->available(client_->spares().spare_pages(owner_) * page));
  return own + bytes / page;
}

}  // namespace kvcached
