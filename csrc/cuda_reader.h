// Copies memory of a GPU to the host through one reused buffer of pinned memory. Reads any memory
// of the GPU, torch's as well as kvcached's. Thread rule: one thread at a time.
#pragma once

#include <span>
#include <vector>

#include "cuda_device.h"
#include "non_copyable.h"

namespace kvcached {

class CudaReader : private NonCopyable {
 public:
  // Retains the GPU's primary context, which the memory's owner uses too. Falls back to pageable
  // memory, which is slower, where the OS refuses to pin. Code::invalid_argument for 0 bytes.
  static Result<std::shared_ptr<CudaReader>> open(int ordinal, uint64_t buffer_bytes);
  ~CudaReader();

  // Stream of the copies, so that work can be ordered before them.
  uint64_t stream() const { return reinterpret_cast<uint64_t>(stream_); }
  uint64_t buffer_bytes() const { return buffer_bytes_; }
  bool is_pinned() const { return pinned_ != nullptr; }
  // Returns the bytes at the address, valid until the next call. REQUIRES: bytes <= buffer_bytes()
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
