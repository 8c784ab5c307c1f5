#include "page_pool.h"

#include <algorithm>

namespace kvcached {

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

Result<std::vector<Handle>> PagePool::take(size_t count) {
  const size_t reused = std::min(count, spares_.size());
  std::vector<Handle> handles;
  if (count > reused) {
    Result<std::vector<Handle>> created = create(count - reused);
    if (!created.ok()) return created;
    handles = std::move(created.value());
  }
  // Ascending order lets the backend map pages that lie together in one call.
  const auto first = spares_.end() - static_cast<std::ptrdiff_t>(reused);
  handles.insert(handles.begin(), first, spares_.end());
  std::sort(handles.begin(), handles.begin() + static_cast<std::ptrdiff_t>(reused));
  spares_.erase(first, spares_.end());
  return handles;
}

Status PagePool::give(std::span<const Handle> handles) {
  spares_.insert(spares_.end(), handles.begin(), handles.end());
  if (spares_.size() <= high_) return {};
  const Result<size_t> trimmed = trim(low_);
  return trimmed.ok() ? Status{} : trimmed.status();
}

Result<size_t> PagePool::trim(size_t keep) {
  if (spares_.size() <= keep) return size_t{0};
  const std::span<const Handle> excess = std::span(spares_).subspan(keep);
  const size_t count = excess.size();
  // Memory first, ledger second: what is resident never exceeds what is charged.
  if (Status status = client_->vmm()->release(excess); !status.ok()) return status;
  spares_.resize(keep);
  if (Status status = client_->release(count * client_->page_bytes()); !status.ok()) return status;
  return count;
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
