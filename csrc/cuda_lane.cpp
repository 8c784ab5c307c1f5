#include "cuda_lane.h"

#include <unistd.h>

namespace kvcached {

namespace {

// A refused wait says nothing about the copies, and their target may be given back next. A
// temporary refusal must not leave copies running.
Status wait_for(const CudaDevice& device, CuStream stream) {
  const auto synchronize = device.functions().stream_synchronize;
  Status status = device.run("cuStreamSynchronize", synchronize, stream);
  if (!status.ok()) (void)device.run("cuStreamSynchronize", synchronize, stream);
  return status;
}

}  // namespace

Result<std::unique_ptr<WeightLane>> CudaLane::make(std::shared_ptr<CudaDevice> target,
                                                   std::shared_ptr<CudaDevice> link, size_t buffers,
                                                   uint64_t buffer_bytes) {
  std::unique_ptr<CudaLane> lane(new CudaLane(std::move(target), std::move(link)));
  KV_TRY(lane->allocate(buffers, buffer_bytes));
  return std::unique_ptr<WeightLane>(std::move(lane));
}

CudaLane::CudaLane(std::shared_ptr<CudaDevice> target, std::shared_ptr<CudaDevice> link)
    : target_(std::move(target)), link_(std::move(link)), owner_pid_(getpid()) {}

CudaLane::~CudaLane() {
  if (getpid() == owner_pid_) {
    free_all();
  } else {
    target_->abandon();
    link_->abandon();
  }
}

Status CudaLane::allocate(size_t buffers, uint64_t buffer_bytes) {
  const CuFunctions& cuda = target_->functions();
  KV_TRY(target_->run("cuStreamCreate", cuda.stream_create, &arriving_, kCuStreamNonBlocking));
  if (!is_direct()) {
    KV_TRY(target_->enable_peer(*link_));
    KV_TRY(link_->run("cuStreamCreate", cuda.stream_create, &feeding_, kCuStreamNonBlocking));
  }
  for (size_t i = 0; i < buffers; ++i) KV_TRY(allocate_buffer(buffer_bytes));
  return {};
}

Status CudaLane::allocate_buffer(uint64_t buffer_bytes) {
  const CuFunctions& cuda = target_->functions();
  Buffer& buffer = buffers_.emplace_back();
  KV_TRY(link_->run("cuMemAllocHost", cuda.mem_alloc_host, &buffer.pinned, buffer_bytes));
  KV_TRY(target_->run("cuEventCreate", cuda.event_create, &buffer.done, kCuEventDisableTiming));
  if (is_direct()) return {};
  KV_TRY(link_->run("cuMemAlloc", cuda.mem_alloc, &buffer.relay, buffer_bytes));
  return link_->run("cuEventCreate", cuda.event_create, &buffer.relayed, kCuEventDisableTiming);
}

void CudaLane::free_all() {
  // What fails here is freed when the process ends.
  (void)drain();
  const CuFunctions& cuda = target_->functions();
  for (const Buffer& buffer : buffers_) {
    if (buffer.pinned != nullptr) (void)link_->run("", cuda.mem_free_host, buffer.pinned);
    if (buffer.relay != 0) (void)link_->run("", cuda.mem_free, buffer.relay);
    if (buffer.relayed != nullptr) (void)link_->run("", cuda.event_destroy, buffer.relayed);
    if (buffer.done != nullptr) (void)target_->run("", cuda.event_destroy, buffer.done);
  }
  if (feeding_ != nullptr) (void)link_->run("", cuda.stream_destroy, feeding_);
  if (arriving_ != nullptr) (void)target_->run("", cuda.stream_destroy, arriving_);
}

Status CudaLane::copy(const WeightChunk& chunk) {
  const Buffer& buffer = buffers_[next_++ % buffers_.size()];
  KV_TRY(target_->run("cuEventSynchronize", target_->functions().event_synchronize, buffer.done));
  KV_TRY(read_exactly(*chunk.path, chunk.file_offset,
                      {static_cast<char*>(buffer.pinned), chunk.bytes}));
  return is_direct() ? send(buffer, chunk.address, chunk.bytes)
                     : relay(buffer, chunk.address, chunk.bytes);
}

Status CudaLane::send(const Buffer& buffer, uint64_t address, uint64_t bytes) {
  const CuFunctions& cuda = target_->functions();
  const void* const source = buffer.pinned;
  KV_TRY(
      target_->run("cuMemcpyHtoDAsync", cuda.memcpy_htod_async, address, source, bytes, arriving_));
  return target_->run("cuEventRecord", cuda.event_record, buffer.done, arriving_);
}

Status CudaLane::relay(const Buffer& buffer, uint64_t address, uint64_t bytes) {
  const CuFunctions& cuda = target_->functions();
  const void* const source = buffer.pinned;
  KV_TRY(link_->run("cuMemcpyHtoDAsync", cuda.memcpy_htod_async, buffer.relay, source, bytes,
                    feeding_));
  KV_TRY(link_->run("cuEventRecord", cuda.event_record, buffer.relayed, feeding_));
  KV_TRY(target_->run("cuStreamWaitEvent", cuda.stream_wait_event, arriving_, buffer.relayed, 0U));
  KV_TRY(target_->run("cuMemcpyPeerAsync", cuda.memcpy_peer_async, address, target_->context(),
                      buffer.relay, link_->context(), bytes, arriving_));
  return target_->run("cuEventRecord", cuda.event_record, buffer.done, arriving_);
}

Status CudaLane::drain() {
  Status fed = feeding_ != nullptr ? wait_for(*link_, feeding_) : Status{};
  Status arrived = arriving_ != nullptr ? wait_for(*target_, arriving_) : Status{};
  return fed.ok() ? arrived : fed;
}

bool CudaLane::is_quiet() { return wait_for(*target_, arriving_).ok(); }

}  // namespace kvcached
