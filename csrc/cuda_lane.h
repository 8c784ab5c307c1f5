// A lane to a GPU: buffers of pinned memory, filled from the file in turn while the GPU fetches the
// others. Over the link of another GPU, each buffer is copied to a buffer in that GPU's memory and
// from there over the link between the two (Prism §5.2: a small staging buffer on each GPU,
// aggregation on the target).
//   direct   file -> pinned -> target                    one stream of the target
//   relayed  file -> pinned -> the other GPU -> target   a stream of each, with an event between
#pragma once

#include "cuda_device.h"
#include "weight_lane.h"

namespace kvcached {

class CudaLane final : public WeightLane {
 public:
  // `link` is the GPU whose link to the host is used. Allocates `buffers` x `buffer_bytes` of
  // pinned memory, and as much on the link's GPU if that is not the target.
  static Result<std::unique_ptr<WeightLane>> make(std::shared_ptr<CudaDevice> target,
                                                  std::shared_ptr<CudaDevice> link, size_t buffers,
                                                  uint64_t buffer_bytes);
  ~CudaLane() override;

  // REQUIRES: at most buffer_bytes
  Status copy(const WeightChunk& chunk) override;
  Status drain() override;
  bool is_quiet() override;

 private:
  struct Buffer {
    void* pinned = nullptr;
    uint64_t relay = 0;         // address in the link's GPU; 0 for a direct lane
    CuEvent relayed = nullptr;  // of the link's GPU: the bytes are in `relay`
    CuEvent done = nullptr;     // of the target: the buffer may be filled again
  };

  CudaLane(std::shared_ptr<CudaDevice> target, std::shared_ptr<CudaDevice> link);
  bool is_direct() const { return target_ == link_; }
  Status allocate(size_t buffers, uint64_t buffer_bytes);
  Status allocate_buffer(uint64_t buffer_bytes);
  Status send(const Buffer& buffer, uint64_t address, uint64_t bytes);
  Status relay(const Buffer& buffer, uint64_t address, uint64_t bytes);
  void free_all();

  const std::shared_ptr<CudaDevice> target_;
  const std::shared_ptr<CudaDevice> link_;
  const int owner_pid_;
  CuStream arriving_ = nullptr;  // of the target
  CuStream feeding_ = nullptr;   // of the link's GPU, for a relayed lane
  std::vector<Buffer> buffers_;
  size_t next_ = 0;
};

}  // namespace kvcached
