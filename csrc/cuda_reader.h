// Copies memory of a GPU to the host, through one buffer of pinned memory that is used again and
// again. What the memory belongs to, torch or kvcached, does not matter.
// Thread rule: one thread at a time.
#pragma once

#include <span>
#include <vector>

#include "cuda_device.h"
#include "non_copyable.h"

namespace kvcached {

class CudaReader : private NonCopyable {
 public:
  // Retains the GPU's primary context, which the memory's maker has too.
  // Code::invalid_argument for 0 bytes. Pageable memory serves where the OS pins none: slower, and
  // no error.
  static Result<std::shared_ptr<CudaReader>> open(int ordinal, uint64_t buffer_bytes);
  ~CudaReader();

  // The stream that copies run on, so that work can be ordered before them.
  uint64_t stream() const { return reinterpret_cast<uint64_t>(stream_); }
  uint64_t buffer_bytes() const { return buffer_bytes_; }
  bool is_pinned() const { return pinned_ != nullptr; }
  // The bytes at the address, in the buffer until the next call.
  // REQUIRES: bytes <= buffer_bytes()
  Result<std::span<const char>> read(uint64_t address, uint64_t bytes);

 private:
  CudaReader(std::unique_ptr<CudaDevice> device, uint64_t buffer_bytes);
  Status allocate();

  const std::unique_ptr<CudaDevice> device_;
  const uint64_t buffer_bytes_;
  const int owner_pid_;
  CuStream stream_ = nullptr;
  void* pinned_ = nullptr;
  std::vector<char> pageable_;
};

}  // namespace kvcached
