// libcuda's streams and events, and the test's hand on them.
#include <cstring>

#include "control.h"
#include "served.h"

using test_libcuda::Error;
using test_libcuda::Simulator;

namespace {

uint64_t number(const void* handle) { return reinterpret_cast<uint64_t>(handle); }

void* handle(uint64_t number) { return reinterpret_cast<void*>(number); }

constexpr unsigned kStreamFlags = 1;  // CU_STREAM_NON_BLOCKING
constexpr unsigned kEventFlags = 7;

}  // namespace

EXPORT int cuStreamCreate(void** stream, unsigned flags) {
  return test_libcuda::served_in_context([=](Simulator& cuda) {
    if ((flags & ~kStreamFlags) != 0) return test_libcuda::kInvalidValue;
    *stream = handle(cuda.streams().make(test_libcuda::current_device()));
    return test_libcuda::kSuccess;
  });
}

EXPORT int cuStreamDestroy_v2(void* stream) {
  return test_libcuda::served_in_context([=](Simulator& cuda) {
    return cuda.streams().remove(number(stream)) ? test_libcuda::kSuccess
                                                 : test_libcuda::kInvalidHandle;
  });
}

// Whoever waits sees the work done.
EXPORT int cuStreamSynchronize(void* stream) {
  return test_libcuda::counted("cuStreamSynchronize", [=](Simulator& cuda) {
    const int device = test_libcuda::current_device();
    if (!cuda.streams().exists(number(stream), device)) return test_libcuda::kInvalidHandle;
    cuda.streams().complete(number(stream), device, UINT64_MAX);
    return test_libcuda::kSuccess;
  });
}

EXPORT int cuMemsetD8Async(uint64_t address, unsigned char value, size_t bytes, void* stream) {
  return test_libcuda::counted("cuMemsetD8Async", [=](Simulator& cuda) {
    if (!cuda.streams().exists(number(stream), test_libcuda::current_device())) {
      return test_libcuda::kInvalidHandle;
    }
    const Error error = cuda.check_fillable(address, bytes);
    if (error == 0) std::memset(reinterpret_cast<void*>(address), value, bytes);
    return error;
  });
}

EXPORT int cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
  return test_libcuda::counted("cuStreamWaitEvent", [=](Simulator& cuda) {
    const int device = test_libcuda::current_device();
    if (flags != 0) return test_libcuda::kInvalidValue;
    if (!cuda.streams().exists(number(stream), device) ||
        !cuda.streams().has_event(number(event))) {
      return test_libcuda::kInvalidHandle;
    }
    cuda.streams().wait_for(number(stream), device, number(event));
    return test_libcuda::kSuccess;
  });
}

EXPORT int cuEventSynchronize(void* event) {
  return test_libcuda::counted("cuEventSynchronize", [=](Simulator& cuda) {
    if (!cuda.streams().has_event(number(event))) return test_libcuda::kInvalidHandle;
    cuda.streams().complete_until(number(event));
    return test_libcuda::kSuccess;
  });
}

EXPORT int cuEventCreate(void** event, unsigned flags) {
  return test_libcuda::counted("cuEventCreate", [=](Simulator& cuda) {
    if ((flags & ~kEventFlags) != 0) return test_libcuda::kInvalidValue;
    *event = handle(cuda.streams().make_event(test_libcuda::current_device()));
    return test_libcuda::kSuccess;
  });
}

EXPORT int cuEventRecord(void* event, void* stream) {
  return test_libcuda::counted("cuEventRecord", [=](Simulator& cuda) {
    const int device = test_libcuda::current_device();
    return cuda.streams().record(number(event), number(stream), device)
               ? test_libcuda::kSuccess
               : test_libcuda::kInvalidHandle;
  });
}

EXPORT int cuEventQuery(void* event) {
  return test_libcuda::counted("cuEventQuery", [=](Simulator& cuda) {
    if (!cuda.streams().has_event(number(event))) return test_libcuda::kInvalidHandle;
    return cuda.streams().has_passed(number(event)) ? test_libcuda::kSuccess
                                                    : test_libcuda::kNotReady;
  });
}

EXPORT int cuEventDestroy_v2(void* event) {
  return test_libcuda::served_in_context([=](Simulator& cuda) {
    return cuda.streams().remove_event(number(event)) ? test_libcuda::kSuccess
                                                      : test_libcuda::kInvalidHandle;
  });
}

EXPORT int test_cuda_launch(uint64_t stream, uint64_t address, uint64_t bytes) {
  return test_libcuda::served_in_context([=](Simulator& cuda) {
    const int device = test_libcuda::current_device();
    if (!cuda.streams().exists(stream, device)) return test_libcuda::kInvalidHandle;
    const Error error = cuda.check_accessible(address, bytes);
    if (error == 0) cuda.streams().launch(stream, device, {address, bytes});
    return error;
  });
}

EXPORT void test_cuda_complete(uint64_t stream, uint64_t count) {
  (void)test_libcuda::served_in_context([=](Simulator& cuda) {
    cuda.streams().complete(stream, test_libcuda::current_device(), count);
    return test_libcuda::kSuccess;
  });
}

EXPORT uint64_t test_cuda_violations() {
  const std::lock_guard lock(test_libcuda::mutex());
  return Simulator::instance().violations();
}
