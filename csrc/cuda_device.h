// One GPU of the driver: its granularity, its primary context, and the calls that make, map and
// drop single allocations there. Knows no rules and keeps no books; vmm_cuda does.
// Thread rule: any thread; every call makes the context current and restores what was before.
#pragma once

#include <memory>

#include "cuda_driver.h"
#include "non_copyable.h"
#include "steps.h"

namespace kvcached {

class CudaDevice : private NonCopyable {
 public:
  // Code::unknown_device if the machine has no such ordinal, Code::hidden_device if
  // CUDA_VISIBLE_DEVICES may be why; Code::unsupported for a MIG instance and for a GPU without
  // virtual memory management.
  static Result<std::unique_ptr<CudaDevice>> open(int ordinal);
  ~CudaDevice();

  int ordinal() const { return ordinal_; }
  // Sizes and addresses are multiples of this: 2 MiB on GPUs of today.
  uint64_t granularity_bytes() const { return granularity_bytes_; }

  Result<uint64_t> reserve(uint64_t bytes, uint64_t alignment);
  Status free_address(uint64_t address, uint64_t bytes);
  // Code::no_room if the GPU is full.
  Result<CuHandle> create(uint64_t bytes);
  Status release(CuHandle handle);
  // Whether allocations of this GPU can be shared with other processes, and with those on
  // `ordinal`.
  bool exports() const { return exports_; }
  bool exports_to(int ordinal) const;
  // A new descriptor that keeps the memory alive. REQUIRES: exports()
  Result<int> export_file(CuHandle handle);
  // The memory behind one, to be released. The descriptor stays the caller's.
  Result<CuHandle> import_file(int fd);
  Status map(uint64_t address, uint64_t bytes, CuHandle handle);
  // May cover many whole mappings, as may set_access.
  Status unmap(uint64_t address, uint64_t bytes);
  enum class Access { read = 1, read_write = 3 };
  Status set_access(uint64_t address, uint64_t bytes, Access access = Access::read_write);
  // Fills with one byte, in no order with other work, and waits for that alone.
  // REQUIRES: one thread at a time
  Status fill(uint64_t address, uint64_t bytes, unsigned char value);

  // An event behind what the stream (0: the default one) was given so far, for destroy_event.
  // Code::in_use while the stream captures a graph: the event would become a part of that.
  Result<CuEvent> record_event(uint64_t stream) const;
  // While the driver forbids the question, not yet. One that a capture took is recorded again.
  Result<bool> has_passed(CuEvent event, uint64_t stream) const;
  void destroy_event(CuEvent event) const;

  // Calls a driver function in the GPU's context; `name` is its symbol, for the message.
  template <class Function, class... Arguments>
  Status run(const char* name, Function function, Arguments... arguments) const {
    return driver_.check(call(function, arguments...), name);
  }
  const CuFunctions& functions() const { return driver_.functions(); }
  CuContext context() const { return context_; }
  // Lets this GPU copy from the other's plain memory over the link between them.
  // Code::unavailable if there is none.
  Status enable_peer(const CudaDevice& peer) const;

  // The child of a fork: the driver is dead there, and the destructor must not call it.
  void abandon() { abandoned_ = true; }

 private:
  class Current;

  CudaDevice(const CudaDriver& driver, int ordinal) : driver_(driver), ordinal_(ordinal) {}
  Status find_device();
  Status check_supported() const;
  Status check_not_capturing(CuStream stream) const;
  Status find_granularity();
  CuAllocationProp allocation() const;

  // Calls a driver function in the GPU's context, and in a capture mode that lets it: while the
  // engine captures a graph in CUDA's default mode, most calls of any thread would fail otherwise,
  // and end the capture too.
  template <class Function, class... Arguments>
  CuResult call(Function function, Arguments... arguments) const {
    const CuFunctions& cuda = driver_.functions();
    const CuResult pushed = cuda.ctx_push_current(context_);
    if (pushed != kCuSuccess) return pushed;
    int mode = kCuRelaxed;
    (void)cuda.thread_exchange_stream_capture_mode(&mode);  // `mode` is what was before now
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
  CuStream own_stream_ = nullptr;  // from the first zero on
  uint64_t granularity_bytes_ = 0;
  bool exports_ = false;
  bool abandoned_ = false;
};

}  // namespace kvcached
