// Guard page that holes of one client show on a GPU: one allocation of zeros, mapped many times,
// read-only where the driver supports that. Elsewhere a stray write changes what every hole shows,
// so rely on the absence of a fault, not on the zeros. Checks no rules and keeps no books; vmm_cuda
// does. Thread rule: the owner's.
#pragma once

#include <memory>

#include "cuda_device.h"

namespace kvcached {

class CudaGuard {
 public:
  static Result<std::unique_ptr<CudaGuard>> make(std::shared_ptr<CudaDevice> device,
                                                 uint64_t page_bytes);

  // Maps the guard page at each page of the range: one call for each and one for the access.
  // Returns the number of bytes from `address` that show it now. The rest stays unmapped. REQUIRES:
  // nothing is mapped there
  uint64_t cover(uint64_t address, uint64_t bytes);
  // Called once, and again after a failure. REQUIRES: no hole is covered
  Status release();

 private:
  CudaGuard(std::shared_ptr<CudaDevice> device, uint64_t page_bytes, CuHandle page)
      : device_(std::move(device)), page_bytes_(page_bytes), page_(page) {}
  Status zero();
  Status zero_at(uint64_t address);
  Status leave_scratch();

  const std::shared_ptr<CudaDevice> device_;
  const uint64_t page_bytes_;
  const CuHandle page_;
  uint64_t scratch_ = 0;  // address at which the page is filled
  bool scratch_is_mapped_ = false;
  CudaDevice::Access access_ = CudaDevice::Access::read;
};

}  // namespace kvcached
