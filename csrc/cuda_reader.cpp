#include "cuda_reader.h"

#include <unistd.h>

namespace kvcached {

Result<std::shared_ptr<CudaReader>> CudaReader::open(int ordinal, uint64_t buffer_bytes) {
  if (buffer_bytes == 0)
    return failure(Code::invalid_argument, "the buffer must have more than 0 bytes");
  KV_ASSIGN(std::unique_ptr<CudaDevice> device, CudaDevice::open(ordinal));
  std::shared_ptr<CudaReader> reader(new CudaReader(std::move(device), buffer_bytes));
  KV_TRY(reader->allocate());
  return reader;
}

CudaReader::CudaReader(std::unique_ptr<CudaDevice> device, uint64_t buffer_bytes)
    : device_(std::move(device)), buffer_bytes_(buffer_bytes), owner_pid_(getpid()) {}

Status CudaReader::allocate() {
  const CuFunctions& cuda = device_->functions();
  KV_TRY(device_->run("cuStreamCreate", cuda.stream_create, &stream_, kCuStreamNonBlocking));
  if (device_->run("cuMemAllocHost", cuda.mem_alloc_host, &pinned_, buffer_bytes_).ok()) return {};
  pinned_ = nullptr;
  pageable_.resize(buffer_bytes_);
  return {};
}

CudaReader::~CudaReader() {
  if (getpid() != owner_pid_) {
    device_->abandon();
    return;
  }
  // What fails here is freed when the process ends.
  const CuFunctions& cuda = device_->functions();
  if (pinned_ != nullptr) (void)device_->run("", cuda.mem_free_host, pinned_);
  if (stream_ != nullptr) (void)device_->run("", cuda.stream_destroy, stream_);
}

Result<std::span<const char>> CudaReader::read(uint64_t address, uint64_t bytes) {
  const CuFunctions& cuda = device_->functions();
  void* const target = pinned_ != nullptr ? pinned_ : pageable_.data();
  Status copied =
      device_->run("cuMemcpyDtoHAsync", cuda.memcpy_dtoh_async, target, address, bytes, stream_);
  // Also after a failure, so that the buffer is not refilled during a copy.
  Status done = device_->run("cuStreamSynchronize", cuda.stream_synchronize, stream_);
  if (!copied.ok()) return copied;
  if (!done.ok()) return done;
  return std::span(static_cast<const char*>(target), bytes);
}

}  // namespace kvcached
