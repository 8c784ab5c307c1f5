#include "test_stream.h"

#include "backends.h"
#include "check.h"
#include "control.h"

namespace kvcached::testing {

TestStream::TestStream(bool on_gpu) : on_gpu_(on_gpu) {
  void* made = nullptr;
  if (on_gpu) CHECK(cuda_function<int(void**, unsigned)>("cuStreamCreate")(&made, 0) == 0);
  cuda_ = reinterpret_cast<Stream>(made);
}

TestStream::~TestStream() {
  if (!on_gpu_) return;
  CHECK(cuda_function<int(void*)>("cuStreamDestroy_v2")(reinterpret_cast<void*>(cuda_)) == 0);
}

void TestStream::submit(uint64_t address, uint64_t bytes) {
  if (!on_gpu_) return host_.submit();
  CHECK(cuda_function<decltype(test_cuda_launch)>("test_cuda_launch")(cuda_, address, bytes) == 0);
}

void TestStream::complete() {
  if (!on_gpu_) return host_.complete();
  cuda_function<decltype(test_cuda_complete)>("test_cuda_complete")(cuda_, 1);
}

}  // namespace kvcached::testing
