#include "cuda_guard.h"

namespace kvcached {

Result<std::unique_ptr<CudaGuard>> CudaGuard::make(std::shared_ptr<CudaDevice> device,
                                                   uint64_t page_bytes) {
  KV_ASSIGN(CuHandle page, device->create(page_bytes));
  std::unique_ptr<CudaGuard> guard(new CudaGuard(std::move(device), page_bytes, page));
  if (Status status = guard->zero(); !status.ok()) {
    (void)guard->release();
    return status;
  }
  (void)guard->leave_scratch();  // on failure, release tries again
  return guard;
}

Status CudaGuard::zero() {
  KV_ASSIGN(scratch_, device_->reserve(page_bytes_, page_bytes_));
  KV_TRY(device_->map(scratch_, page_bytes_, page_));
  scratch_is_mapped_ = true;
  return zero_at(scratch_);
}

Status CudaGuard::leave_scratch() {
  if (scratch_is_mapped_) KV_TRY(device_->unmap(scratch_, page_bytes_));
  scratch_is_mapped_ = false;
  if (scratch_ != 0) KV_TRY(device_->free_address(scratch_, page_bytes_));
  scratch_ = 0;
  return {};
}

Status CudaGuard::release() {
  KV_TRY(leave_scratch());
  return device_->release(page_);
}

Status CudaGuard::zero_at(uint64_t address) {
  KV_TRY(device_->set_access(address, page_bytes_));
  KV_TRY(device_->fill(address, page_bytes_, 0));
  const bool supported = device_->set_access(address, page_bytes_, CudaDevice::Access::read).ok();
  access_ = supported ? CudaDevice::Access::read : CudaDevice::Access::read_write;
  return {};
}

uint64_t CudaGuard::cover(uint64_t address, uint64_t bytes) {
  uint64_t covered = 0;
  while (covered < bytes && device_->map(address + covered, page_bytes_, page_).ok()) {
    covered += page_bytes_;
  }
  if (covered == 0 || device_->set_access(address, covered, access_).ok()) return covered;
  return device_->unmap(address, covered).ok() ? 0 : covered;
}

}  // namespace kvcached
