// Serves a driver function of the library: with the lock held, for a process that called cuInit,
// where needed in a current context, and failing if the test asked for that.
#pragma once

#include <mutex>

#include "call_log.h"
#include "simulator.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace test_libcuda {

std::mutex& mutex();
// Returns the device of the thread's current context, or -1.
int current_device();
// Mode of the thread in captures: cuThreadExchangeStreamCaptureMode.
CaptureMode capture_mode();
// Returns the device of a primary context.
int device_of(const void* context);

template <class Body>
int served(Body body) {
  Simulator& cuda = Simulator::instance();
  if (const Error error = cuda.check_usable(); error != 0) return error;
  const std::lock_guard lock(mutex());
  return body(cuda);
}

// CUDA's documentation does not promise that these calls work without a current context.
template <class Body>
int served_in_context(Body body) {
  return served([&](Simulator& cuda) {
    return cuda.has_context(current_device()) ? body(cuda) : kInvalidContext;
  });
}

template <class Body>
int counted(const char* function, Body body) {
  return served_in_context([&](Simulator& cuda) {
    const int injected = CallLog::instance().record(function, current_device());
    return injected != 0 ? static_cast<Error>(injected) : body(cuda);
  });
}

}  // namespace test_libcuda
