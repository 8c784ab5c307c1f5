#include "cuda_window.h"

#include <unistd.h>

namespace kvcached {

namespace {

// What fails again is freed when the process ends.
template <class Call>
void insist(Call call) {
  if (!call().ok()) (void)call();
}

}  // namespace

Result<std::unique_ptr<PageWindow>> CudaWindow::open(std::shared_ptr<CudaDevice> device,
                                                     const SharedPages& pages,
                                                     uint64_t page_bytes) {
  KV_TRY(check_shared(pages, page_bytes));
  const uint64_t bytes = pages.places.size() * page_bytes;
  std::unique_ptr<CudaWindow> window(new CudaWindow(std::move(device), bytes));
  KV_TRY(window->show(pages, page_bytes));
  return std::unique_ptr<PageWindow>(std::move(window));
}

CudaWindow::CudaWindow(std::shared_ptr<CudaDevice> device, uint64_t bytes)
    : device_(std::move(device)), bytes_(bytes), owner_pid_(getpid()) {}

CudaWindow::~CudaWindow() {
  if (getpid() != owner_pid_) return;
  const CuFunctions& cuda = device_->functions();
  if (stream_ != nullptr) (void)device_->run("", cuda.stream_destroy, stream_);
  insist([&] { return mapped_bytes_ > 0 ? device_->unmap(address_, mapped_bytes_) : Status{}; });
  insist([&] { return address_ != 0 ? device_->free_address(address_, bytes_) : Status{}; });
  for (const CuHandle memory : unreleased_) insist([&] { return device_->release(memory); });
}

Status CudaWindow::show(const SharedPages& pages, uint64_t page_bytes) {
  KV_ASSIGN(address_, device_->reserve(bytes_, page_bytes));
  for (const SharedPages::Place& place : pages.places) {
    if (place.offset != 0) {
      return failure(Code::invalid_argument, "a page of a GPU must start at offset 0 of its file");
    }
    KV_TRY(show_page(pages.files[place.file].get(), page_bytes));
  }
  KV_TRY(let_read());
  return device_->run("cuStreamCreate", device_->functions().stream_create, &stream_,
                      kCuStreamNonBlocking);
}

// The mapping keeps the memory from now on, so the handle is released.
Status CudaWindow::show_page(int file, uint64_t page_bytes) {
  KV_ASSIGN(CuHandle memory, device_->import_file(file));
  Status mapped = device_->map(address_ + mapped_bytes_, page_bytes, memory);
  if (mapped.ok()) mapped_bytes_ += page_bytes;
  if (!device_->release(memory).ok()) unreleased_.push_back(memory);
  return mapped;
}

Status CudaWindow::let_read() {
  using Access = CudaDevice::Access;
  if (device_->set_access(address_, bytes_, Access::read).ok()) return {};
  Status status = device_->set_access(address_, bytes_, Access::read_write);
  if (status.ok()) return {};
  return failure(Code::unavailable, "cuda:", device_->ordinal(),
                 " cannot read the other GPU's memory: ", status.message);
}

Status CudaWindow::copy(std::span<const CopyRun> runs) {
  KV_TRY(check_copy(runs, bytes_));
  const CuFunctions& cuda = device_->functions();
  Status copied;
  for (size_t i = 0; i < runs.size() && copied.ok(); ++i) {
    copied = device_->run("cuMemcpyDtoDAsync", cuda.memcpy_dtod_async, runs[i].target,
                          address_ + runs[i].source_offset, runs[i].bytes, stream_);
  }
  // A failure says nothing about other copies, so wait for all before their memory can be given
  // back.
  Status done = device_->run("cuStreamSynchronize", cuda.stream_synchronize, stream_);
  if (!done.ok()) (void)device_->run("cuStreamSynchronize", cuda.stream_synchronize, stream_);
  return copied.ok() ? done : copied;
}

}  // namespace kvcached
