// A Vmm that fails on demand: the Nth call to map or unmap from now on, and as many after it as
// asked for. Everything else goes to the backend below.
#pragma once

#include "vmm.h"

namespace kvcached::testing {

class FaultyVmm final : public Vmm {
 public:
  explicit FaultyVmm(std::shared_ptr<Vmm> below) : below_(std::move(below)) {}

  void fail_at(int call, int times = 1) {
    countdown_ = call;
    times_ = times;
  }
  int calls() const { return calls_; }

  uint64_t page_bytes() const override { return below_->page_bytes(); }
  Result<uint64_t> reserve(uint64_t bytes) override { return below_->reserve(bytes); }
  Status free_address(uint64_t address, uint64_t bytes) override {
    return below_->free_address(address, bytes);
  }
  Result<std::vector<Handle>> create(size_t count) override {
    if (must_fail()) return injected();
    return below_->create(count);
  }
  Status release(std::span<const Handle> handles) override { return below_->release(handles); }
  Status map(uint64_t address, std::span<const Handle> handles) override {
    return must_fail() ? injected() : below_->map(address, handles);
  }
  Status set_access(uint64_t address, uint64_t bytes) override {
    return must_fail() ? injected() : below_->set_access(address, bytes);
  }
  Status unmap(uint64_t address, uint64_t bytes) override {
    return must_fail() ? injected() : below_->unmap(address, bytes);
  }
  Status close() override { return below_->close(); }
  Status check_open() const override { return below_->check_open(); }
  int memory_fd() const override { return below_->memory_fd(); }

 private:
  static Status injected() { return failure(Code::system_call, "injected"); }
  bool must_fail() {
    ++calls_;
    if (countdown_ > 0 && --countdown_ > 0) return false;
    if (times_ == 0) return false;
    --times_;
    return true;
  }

  const std::shared_ptr<Vmm> below_;
  int calls_ = 0;
  int countdown_ = 0;
  int times_ = 0;
};

}  // namespace kvcached::testing
