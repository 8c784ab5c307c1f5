// libcuda's streams and events, and their control by tests.
#include "control.h"
#include "served.h"

using test_libcuda::Error;
using test_libcuda::handle;
using test_libcuda::number;
using test_libcuda::Simulator;
using test_libcuda::Work;

namespace {

constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING
constexpr unsigned kEventFlags = 7;

Error make_stream(Simulator& cuda, void** stream, unsigned flags) {
  if ((flags & ~kNonBlocking) != 0) return test_libcuda::kInvalidValue;
  *stream = handle(cuda.streams().make(test_libcuda::current_device(), flags == 0));
  return test_libcuda::kSuccess;
}

// Returns an error unless the host may wait for the stream or query it.
Error check_waitable(Simulator& cuda, const char* call, const void* stream) {
  const int device = test_libcuda::current_device();
  if (!cuda.streams().exists(number(stream), device)) return test_libcuda::kInvalidHandle;
  if (stream == nullptr) return cuda.check_synchronous(call);
  if (cuda.captures().status(number(stream)) != test_libcuda::CaptureStatus::none) {
    cuda.captures().invalidate(number(stream));
    return test_libcuda::kCaptureUnsupported;
  }
  return cuda.check_safe(call);
}

Error check_event(Simulator& cuda, const char* call, const void* event) {
  if (!cuda.streams().has_event(number(event))) return test_libcuda::kInvalidHandle;
  if (cuda.captures().has_event(number(event))) {
    cuda.captures().invalidate_of_event(number(event));
    return test_libcuda::kCapturedEvent;
  }
  return cuda.check_safe(call);
}

}  // namespace

EXPORT int cuStreamCreate(void** stream, unsigned flags) {
  return test_libcuda::served_in_context(
      [=](Simulator& cuda) { return make_stream(cuda, stream, flags); });
}

EXPORT int cuStreamCreateWithPriority(void** stream, unsigned flags, int) {
  return test_libcuda::served_in_context(
      [=](Simulator& cuda) { return make_stream(cuda, stream, flags); });
}

EXPORT int cuStreamDestroy_v2(void* stream) {
  return test_libcuda::served_in_context([=](Simulator& cuda) {
    return cuda.streams().remove(number(stream)) ? test_libcuda::kSuccess
                                                 : test_libcuda::kInvalidHandle;
  });
}

// The work is done when this returns.
EXPORT int cuStreamSynchronize(void* stream) {
  return test_libcuda::counted("cuStreamSynchronize", [=](Simulator& cuda) {
    const Error error = check_waitable(cuda, "cuStreamSynchronize", stream);
    if (error != 0) return error;
    cuda.streams().complete(number(stream), test_libcuda::current_device(), UINT64_MAX);
    return test_libcuda::kSuccess;
  });
}

EXPORT int cuStreamQuery(void* stream) {
  return test_libcuda::counted("cuStreamQuery", [=](Simulator& cuda) {
    const Error error = check_waitable(cuda, "cuStreamQuery", stream);
    if (error != 0) return error;
    const int device = test_libcuda::current_device();
    if (!cuda.streams().has_work(number(stream), device)) return test_libcuda::kSuccess;
    if (cuda.settings().progress) cuda.streams().complete(number(stream), device, 1);
    return test_libcuda::kNotReady;
  });
}

EXPORT int cuCtxSynchronize() {
  return test_libcuda::counted("cuCtxSynchronize", [](Simulator& cuda) {
    const Error error = cuda.check_synchronous("cuCtxSynchronize");
    if (error == 0) cuda.streams().complete_device(test_libcuda::current_device());
    return error;
  });
}

EXPORT int cuMemsetD8Async(uint64_t address, unsigned char value, size_t bytes, void* stream) {
  return test_libcuda::counted("cuMemsetD8Async", [=](Simulator& cuda) {
    const int device = test_libcuda::current_device();
    if (!cuda.streams().exists(number(stream), device)) return test_libcuda::kInvalidHandle;
    return cuda.fill(address, value, bytes, number(stream));
  });
}

// Called in the stream's order, with the library's lock held: it must not call the library.
EXPORT int cuLaunchHostFunc(void* stream, void (*function)(void*), void* argument) {
  return test_libcuda::counted("cuLaunchHostFunc", [=](Simulator& cuda) {
    const int device = test_libcuda::current_device();
    if (!cuda.streams().exists(number(stream), device)) return test_libcuda::kInvalidHandle;
    Work work;
    work.run = [=] { function(argument); };
    return cuda.enqueue(number(stream), device, std::move(work));
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
    const bool captures =
        cuda.captures().status(number(stream)) != test_libcuda::CaptureStatus::none;
    if (cuda.captures().has_event(number(event)) ||
        (captures && cuda.streams().was_recorded(number(event)))) {
      return cuda.captures().wait(number(stream), number(event));
    }
    if (!captures) cuda.streams().wait_for(number(stream), device, number(event));
    return test_libcuda::kSuccess;
  });
}

EXPORT int cuEventSynchronize(void* event) {
  return test_libcuda::counted("cuEventSynchronize", [=](Simulator& cuda) {
    const Error error = check_event(cuda, "cuEventSynchronize", event);
    if (error == 0) cuda.streams().complete_until(number(event));
    return error;
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
    if (!cuda.streams().record(number(event), number(stream), device)) {
      return test_libcuda::kInvalidHandle;
    }
    cuda.captures().forget_event(number(event));
    switch (cuda.captures().status(number(stream))) {
      case test_libcuda::CaptureStatus::invalidated:
        return test_libcuda::kCaptureInvalidated;
      case test_libcuda::CaptureStatus::active:
        cuda.captures().record_event(number(stream), number(event));
        return test_libcuda::kSuccess;
      case test_libcuda::CaptureStatus::none:
        break;
    }
    if (stream != nullptr || !cuda.captures().blocks_default(device)) return test_libcuda::kSuccess;
    cuda.captures().invalidate_blocking(device);
    return test_libcuda::kCaptureImplicit;
  });
}

EXPORT int cuEventQuery(void* event) {
  return test_libcuda::counted("cuEventQuery", [=](Simulator& cuda) {
    const Error error = check_event(cuda, "cuEventQuery", event);
    if (error != 0) return error;
    if (cuda.streams().has_passed(number(event))) return test_libcuda::kSuccess;
    if (cuda.settings().progress) cuda.streams().complete_until(number(event), 1);
    return test_libcuda::kNotReady;
  });
}

EXPORT int cuEventDestroy_v2(void* event) {
  return test_libcuda::served_in_context([=](Simulator& cuda) {
    cuda.captures().forget_event(number(event));
    return cuda.streams().remove_event(number(event)) ? test_libcuda::kSuccess
                                                      : test_libcuda::kInvalidHandle;
  });
}

EXPORT int test_cuda_launch(uint64_t stream, uint64_t address, uint64_t bytes) {
  return test_libcuda::served_in_context([=](Simulator& cuda) {
    const int device = test_libcuda::current_device();
    if (!cuda.streams().exists(stream, device)) return test_libcuda::kInvalidHandle;
    const Error error = cuda.check_accessible(address, bytes);
    return error != 0 ? error : cuda.enqueue(stream, device, {address, bytes});
  });
}

EXPORT int test_cuda_launch_over_holes(uint64_t stream, uint64_t address, uint64_t bytes) {
  return test_libcuda::served_in_context([=](Simulator& cuda) {
    const int device = test_libcuda::current_device();
    if (!cuda.streams().exists(stream, device)) return test_libcuda::kInvalidHandle;
    Work work{address, bytes};
    work.may_meet_holes = true;
    return cuda.enqueue(stream, device, std::move(work));
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
