// A stream whose work a test submits and completes, on a host device or on the test libcuda's first
// GPU, where the work touches addresses.
#pragma once

#include "host_stream.h"

namespace kvcached::testing {

class TestStream {
 public:
  explicit TestStream(bool on_gpu);
  ~TestStream();
  TestStream(const TestStream&) = delete;
  TestStream& operator=(const TestStream&) = delete;

  Stream handle() const { return on_gpu_ ? cuda_ : host_.handle(); }
  // REQUIRES: accessible
  void submit(uint64_t address, uint64_t bytes);
  void complete();

 private:
  const bool on_gpu_;
  HostStream host_;
  Stream cuda_ = 0;
};

}  // namespace kvcached::testing
