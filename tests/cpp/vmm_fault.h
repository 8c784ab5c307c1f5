// Decorator for tests: passes every call to the Vmm below, records it, and fails selected calls
// without passing them on. close() is neither counted nor failed.
// Thread rule: any thread.
#pragma once

#include <mutex>

#include "vmm.h"

namespace kvcached {

enum class VmmCall {
  reserve,
  free_address,
  create,
  release,
  map,
  set_access,
  unmap,
  record_event,
  export_pages,
  open_window,
  guard_holes,
  fill,
};

class FaultVmm final : public Vmm {
 public:
  explicit FaultVmm(std::shared_ptr<Vmm> below) : below_(std::move(below)) {}

  // Fails the Nth call from now on (1: the next) and the `times` - 1 after it.
  void fail_at(size_t call, size_t times = 1, Code code = Code::system_call);
  // Returns every call so far, failed ones included.
  std::vector<VmmCall> calls() const;

  uint64_t page_bytes() const override { return below_->page_bytes(); }
  Location location() const override { return below_->location(); }
  Result<uint64_t> reserve(uint64_t bytes) override;
  Status free_address(uint64_t address, uint64_t bytes) override;
  Result<std::vector<Handle>> create(size_t count) override;
  Result<std::vector<Handle>> create_block(size_t count) override;
  Status release(std::span<const Handle> handles) override;
  Status map(uint64_t address, std::span<const Handle> handles) override;
  Status set_access(uint64_t address, uint64_t bytes) override;
  Status unmap(uint64_t address, uint64_t bytes) override;
  Status fill(uint64_t address, uint64_t bytes, unsigned char value) override;
  bool makes_zeros() const override { return below_->makes_zeros(); }
  Result<std::unique_ptr<StreamEvent>> record_event(Stream stream) override;
  bool can_share_with(const Location& other) const override {
    return below_->can_share_with(other);
  }
  Result<SharedPages> export_pages(std::span<const Handle> handles) override;
  Result<std::unique_ptr<PageWindow>> open_window(const SharedPages& pages) override;
  Status guard_holes() override;
  Status cover(uint64_t address, uint64_t bytes) override;
  void scrub_pages() override { below_->scrub_pages(); }
  Status close() override { return below_->close(); }
  Status check_open() const override { return below_->check_open(); }
  int memory_fd() const override { return below_->memory_fd(); }

 private:
  // Records the call. Returns a failure if the call must fail.
  Status pass(VmmCall call);

  const std::shared_ptr<Vmm> below_;
  std::vector<VmmCall> calls_;
  size_t first_failing_ = 0;  // counted from 1
  size_t end_failing_ = 0;
  Code code_ = Code::system_call;
  mutable std::mutex mutex_;
};

}  // namespace kvcached
