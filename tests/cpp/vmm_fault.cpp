#include "vmm_fault.h"

#include "steps.h"

namespace kvcached {

void FaultVmm::fail_at(size_t call, size_t times, Code code) {
  const std::lock_guard lock(mutex_);
  first_failing_ = calls_.size() + call;
  end_failing_ = first_failing_ + times;
  code_ = code;
}

std::vector<VmmCall> FaultVmm::calls() const {
  const std::lock_guard lock(mutex_);
  return calls_;
}

Status FaultVmm::pass(VmmCall call) {
  step("vmm: about to call");
  const std::lock_guard lock(mutex_);
  calls_.push_back(call);
  if (calls_.size() < first_failing_ || calls_.size() >= end_failing_) return {};
  return failure(code_, "injected");
}

Result<uint64_t> FaultVmm::reserve(uint64_t bytes) {
  KV_TRY(pass(VmmCall::reserve));
  return below_->reserve(bytes);
}

Status FaultVmm::free_address(uint64_t address, uint64_t bytes) {
  KV_TRY(pass(VmmCall::free_address));
  return below_->free_address(address, bytes);
}

Result<std::vector<Handle>> FaultVmm::create(size_t count) {
  KV_TRY(pass(VmmCall::create));
  return below_->create(count);
}

Result<std::vector<Handle>> FaultVmm::create_block(size_t count) {
  KV_TRY(pass(VmmCall::create));
  return below_->create_block(count);
}

Status FaultVmm::release(std::span<const Handle> handles) {
  KV_TRY(pass(VmmCall::release));
  return below_->release(handles);
}

Status FaultVmm::map(uint64_t address, std::span<const Handle> handles) {
  KV_TRY(pass(VmmCall::map));
  return below_->map(address, handles);
}

Status FaultVmm::set_access(uint64_t address, uint64_t bytes) {
  KV_TRY(pass(VmmCall::set_access));
  return below_->set_access(address, bytes);
}

Result<std::unique_ptr<StreamEvent>> FaultVmm::record_event(Stream stream) {
  KV_TRY(pass(VmmCall::record_event));
  return below_->record_event(stream);
}

Result<SharedPages> FaultVmm::export_pages(std::span<const Handle> handles) {
  KV_TRY(pass(VmmCall::export_pages));
  return below_->export_pages(handles);
}

Result<std::unique_ptr<PageWindow>> FaultVmm::open_window(const SharedPages& pages) {
  KV_TRY(pass(VmmCall::open_window));
  return below_->open_window(pages);
}

Status FaultVmm::guard_holes() {
  KV_TRY(pass(VmmCall::guard_holes));
  return below_->guard_holes();
}

Status FaultVmm::cover(uint64_t address, uint64_t bytes) {
  KV_TRY(pass(VmmCall::guard_holes));
  return below_->cover(address, bytes);
}

Status FaultVmm::fill(uint64_t address, uint64_t bytes, unsigned char value) {
  KV_TRY(pass(VmmCall::fill));
  return below_->fill(address, bytes, value);
}

Status FaultVmm::unmap(uint64_t address, uint64_t bytes) {
  KV_TRY(pass(VmmCall::unmap));
  return below_->unmap(address, bytes);
}

}  // namespace kvcached
