// One GPU of the driver: its granularity, its primary context, and the calls that create, map and
// release single allocations. Checks no rules and keeps no books; vmm_cuda does.
// Thread rule: any thread. Every call makes the context current and restores the previous one.
#pragma once

#include <memory>

#include "cuda_driver.h"
#include "non_copyable.h"
#include "steps.h"

namespace kvcached {

class CudaDevice : private NonCopyable {
 public:
  // Code::unknown_device if the machine does not have this ordinal, Code::hidden_device if
  // CUDA_VISIBLE_DEVICES may be the reason. Code::unsupported for a MIG instance and for a GPU
  // without virtual memory management.
  static Result<std::unique_ptr<CudaDevice>> open(int ordinal);
  ~CudaDevice();

  int ordinal() const { return ordinal_; }
  // Sizes and addresses are multiples of this. 2 MiB on current GPUs.
  uint64_t granularity_bytes() const { return granularity_bytes_; }

  Result<uint64_t> reserve(uint64_t bytes, uint64_t alignment);
  Status free_address(uint64_t address, uint64_t bytes);
  // Code::no_room if the GPU is full.
  Result<CuHandle> create(uint64_t bytes);
  Status release(CuHandle handle);
  // True if allocations of this GPU can be shared with other processes, and with those on
  // `ordinal`.
  bool exports() const { return exports_; }
  bool exports_to(int ordinal) const;
  // Returns a new descriptor that keeps the memory alive. REQUIRES: exports()
  Result<int> export_file(CuHandle handle);
  // Returns a handle of a descriptor's memory, to be released. The caller keeps the descriptor.
  Result<CuHandle> import_file(int fd);
  Status map(uint64_t address, uint64_t bytes, CuHandle handle);
  // The range may cover many whole mappings, also in set_access.
  Status unmap(uint64_t address, uint64_t bytes);
  enum class Access { read = 1, read_write = 3 };
  Status set_access(uint64_t address, uint64_t bytes, Access access = Access::read_write);
  // Fills with one byte, not ordered with other work, and waits only for the fill. REQUIRES: one
  // thread at a time
  Status fill(uint64_t address, uint64_t bytes, unsigned char value);

  // Records an event after the work submitted to the stream so far (0: the default stream). The
  // caller calls destroy_event. Code::in_use while the stream captures a graph, which the event
  // would become a part of.
  Result<CuEvent> record_event(uint64_t stream) const;
  // False while the driver forbids the query. An event that a capture absorbed is recorded again.
  Result<bool> has_passed(CuEvent event, uint64_t stream) const;
  void destroy_event(CuEvent event) const;

  // Calls a driver function in the GPU's context; `name` is its symbol, for the message.
  template <class Function, class... Arguments>
  Status run(const char* name, Function function, Arguments... arguments) const {
    return driver_.check(call(function, arguments...), name);
  }
  const CuFunctions& functions() const { return driver_.functions(); }
  CuContext context() const { return context_; }
  // Lets this GPU copy from the other's plain memory over the link between them. Code::unavailable
  // if they are not linked.
  Status enable_peer(const CudaDevice& peer) const;

  // For the child of a fork, where the driver is dead and the destructor must not call it.
  void abandon() { abandoned_ = true; }

 private:
  class Current;

  CudaDevice(const CudaDriver& driver, int ordinal) : driver_(driver), ordinal_(ordinal) {}
  Status find_device();
  Status check_supported() const;
  Status check_not_capturing(CuStream stream) const;
  Status find_granularity();
  CuAllocationProp allocation() const;

  // Calls a driver function in the GPU's context and in the relaxed capture mode. Otherwise, while
  // the engine captures a graph in CUDA's default mode, most calls of any thread would fail and end
  // the capture.
  template <class Function, class... Arguments>
  CuResult call(Function function, Arguments... arguments) const {
    const CuFunctions& cuda = driver_.functions();
    const CuResult pushed = cuda.ctx_push_current(context_);
    if (pushed != kCuSuccess) return pushed;
    int mode = kCuRelaxed;
    (void)cuda.thread_exchange_stream_capture_mode(&mode);  // `mode` is now the previous one
    const CuResult result = function(arguments...);
    step("cuda: a driver call is done");
    (void)cuda.thread_exchange_stream_capture_mode(&mode);
    CuContext popped = nullptr;
    (void)cuda.ctx_pop_current(&popped);
    return result;
  }

  const CudaDriver& driver_;
  const int ordinal_;
  CuOrdinal device_ = 0;
  CuContext context_ = nullptr;
  CuStream own_stream_ = nullptr;  // from the first fill
  uint64_t granularity_bytes_ = 0;
  bool exports_ = false;
  bool abandoned_ = false;
};

}  // namespace kvcached
