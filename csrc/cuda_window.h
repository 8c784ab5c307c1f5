// Pages of another process's GPU memory, imported and mapped so that this GPU can read them, over
// the link between the two GPUs if they differ. A driver without read-only mappings maps them with
// write access, which is not used. Thread rule: one thread at a time.
#pragma once

#include "cuda_device.h"
#include "page_window.h"

namespace kvcached {

class CudaWindow final : public PageWindow {
 public:
  // Code::unavailable if the GPU cannot read the memory.
  static Result<std::unique_ptr<PageWindow>> open(std::shared_ptr<CudaDevice> device,
                                                  const SharedPages& pages, uint64_t page_bytes);
  ~CudaWindow() override;

  uint64_t address() const override { return address_; }
  uint64_t bytes() const override { return bytes_; }
  Status copy(std::span<const CopyRun> runs) override;

 private:
  CudaWindow(std::shared_ptr<CudaDevice> device, uint64_t bytes);
  Status show(const SharedPages& pages, uint64_t page_bytes);
  Status show_page(int file, uint64_t page_bytes);
  Status let_read();

  const std::shared_ptr<CudaDevice> device_;
  const uint64_t bytes_;
  const int owner_pid_;
  uint64_t address_ = 0;
  uint64_t mapped_bytes_ = 0;
  std::vector<CuHandle> unreleased_;  // their release failed
  CuStream stream_ = nullptr;
};

}  // namespace kvcached
