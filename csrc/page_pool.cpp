#include "page_pool.h"

#include <algorithm>

namespace kvcached {

void PagePool::add_spares(std::span<const Handle> handles) {
  const auto old = static_cast<std::ptrdiff_t>(spares_.size());
  spares_.insert(spares_.end(), handles.begin(), handles.end());
  std::sort(spares_.begin() + old, spares_.end());
  std::inplace_merge(spares_.begin(), spares_.begin() + old, spares_.end());
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
  std::sort(removed.begin(), removed.end());
  return removed;
}

Status PagePool::reserve(uint64_t bytes) {
  Status status = client_->reserve(bytes);
  if (status.code != Code::no_room) return status;
  client_->give_back_spares(owner_);
  return client_->reserve(bytes);
}

Result<std::vector<Handle>> PagePool::create(size_t count) {
  const uint64_t bytes = count * client_->page_bytes();
  if (Status status = reserve(bytes); !status.ok()) return status;
  Result<std::vector<Handle>> handles = client_->vmm()->create(count);
  Status outcome = handles.ok() ? client_->commit(bytes) : handles.status();
  if (outcome.ok()) return handles;
  if (handles.ok()) (void)client_->vmm()->release(handles.value());
  if (Status status = client_->cancel(bytes); !status.ok()) return status;
  return outcome;
}

Status PagePool::find_room(size_t count) {
  const uint64_t bytes = count * client_->page_bytes();
  KV_TRY(reserve(bytes));
  return client_->cancel(bytes);
}

Result<std::vector<Handle>> PagePool::take(size_t count) {
  const size_t reused = std::min(count, spares_.size());
  std::vector<Handle> handles;
  if (count > reused) {
    Result<std::vector<Handle>> created = create(count - reused);
    if (!created.ok()) return created;
    handles = std::move(created.value());
  }
  const std::vector<Handle> spares = remove_spares(reused, true);
  handles.insert(handles.begin(), spares.begin(), spares.end());
  return handles;
}

Status PagePool::give(std::span<const Handle> handles) {
  add_spares(handles);
  if (spares_.size() <= high_) return {};
  const Result<size_t> trimmed = trim(low_);
  return trimmed.ok() ? Status{} : trimmed.status();
}

Result<size_t> PagePool::trim(size_t keep) {
  if (spares_.size() <= keep) return size_t{0};
  const std::vector<Handle> excess = remove_spares(spares_.size() - keep, false);
  // Memory first, ledger second: what is resident never exceeds what is charged.
  if (Status status = client_->vmm()->release(excess); !status.ok()) {
    add_spares(excess);
    return status;
  }
  const uint64_t bytes = excess.size() * client_->page_bytes();
  if (Status status = client_->release(bytes); !status.ok()) return status;
  return excess.size();
}

Status PagePool::set_watermarks(size_t low, size_t high) {
  if (low > high) {
    return failure(Code::invalid_argument, "the low watermark is above the high one; swap them");
  }
  low_ = low;
  high_ = high;
  if (spares_.size() <= high_) return {};
  const Result<size_t> trimmed = trim(low_);
  return trimmed.ok() ? Status{} : trimmed.status();
}

Result<size_t> PagePool::available_pages() {
  Result<uint64_t> bytes = client_->available();
  if (!bytes.ok()) return bytes.status();
  return spares_.size() + bytes.value() / client_->page_bytes();
}

}  // namespace kvcached
