// CudaVmm: creation and release of pages, single or in blocks.
#include "vmm_cuda.h"

namespace kvcached {

void CudaVmm::drop(std::span<const CuHandle> unowned) {
  for (const CuHandle handle : unowned) {
    if (!device_->release(handle).ok()) owed_.push_back(handle);
  }
}

Status CudaVmm::create_all(std::span<CuHandle> made) {
  for (size_t i = 0; i < made.size(); ++i) {
    Result<CuHandle> handle = device_->create(page_bytes());
    if (!handle.ok()) {
      drop(made.first(i));
      return handle.status();
    }
    made[i] = handle.value();
  }
  return {};
}

Result<std::vector<Handle>> CudaVmm::create(size_t count) {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_open());
  if (count == 0) return failure(Code::invalid_argument, "cannot create 0 pages");
  std::vector<CuHandle> made(count);
  KV_TRY(create_all(made));
  std::vector<Handle> handles = books_.create(count);
  for (size_t i = 0; i < count; ++i) made_.emplace(handles[i], made[i]);
  return handles;
}

Result<std::vector<Handle>> CudaVmm::create_block(size_t count) {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_open());
  if (count == 0) return failure(Code::invalid_argument, "cannot create 0 pages");
  KV_ASSIGN(CuHandle made, device_->create(count * page_bytes()));
  std::vector<Handle> handles = books_.create_block(count);
  made_.emplace(handles[0], made);
  return handles;
}

Status CudaVmm::release_all(std::span<const Handle> handles) {
  for (const Handle handle : handles) {
    const auto made = made_.find(handle);
    if (made == made_.end()) continue;
    // The caller keeps the handles that are freed already, without memory until they are mapped.
    KV_TRY(device_->release(made->second));
    made_.erase(made);
  }
  return {};
}

Result<CuHandle> CudaVmm::memory_of(Handle handle) {
  const auto made = made_.find(handle);
  if (made != made_.end()) return made->second;
  Result<CuHandle> created = device_->create(books_.pages_from(handle) * page_bytes());
  if (created.ok()) made_.emplace(handle, created.value());
  return created;
}

Status CudaVmm::release(std::span<const Handle> handles) {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_open());
  KV_ASSIGN(std::vector<Handle> idle, books_.mark_released(handles));
  if (Status status = release_all(idle); !status.ok()) {
    books_.unmark_released(handles);
    return status;
  }
  books_.forget(idle);
  return {};
}

}  // namespace kvcached
