// libcuda's copies: pinned host memory, plain device memory, peer access. A copy is made when its
// stream is completed, not when it is submitted, so that a buffer that is refilled too early
// delivers the wrong bytes, as it may on a GPU.
#include <cstring>

#include "control.h"
#include "served.h"

using test_libcuda::Error;
using test_libcuda::number;
using test_libcuda::Simulator;
using test_libcuda::Work;

namespace {

// The source first: both ends are touched until the copy is made.
Error submit(Simulator& cuda, uint64_t stream, Work from, Work to, void* target,
             const void* source) {
  const int device = test_libcuda::current_device();
  to.run = [=, bytes = to.bytes] { std::memcpy(target, source, bytes); };
  const Error error = cuda.enqueue(stream, device, std::move(from));
  return error != 0 ? error : cuda.enqueue(stream, device, std::move(to));
}

Error copy_between(Simulator& cuda, uint64_t stream, uint64_t target, uint64_t source,
                   size_t bytes) {
  return submit(cuda, stream, {source, bytes}, {target, bytes}, cuda.view(target),
                cuda.view(source));
}

}  // namespace

EXPORT int cuMemAllocHost_v2(void** memory, size_t bytes) {
  return test_libcuda::counted("cuMemAllocHost", [=](Simulator& cuda) {
    if (const Error error = cuda.check_safe("cuMemAllocHost"); error != 0) return error;
    if (bytes == 0) return test_libcuda::kInvalidValue;
    *memory = cuda.copies().allocate_pinned(bytes);
    return *memory != nullptr ? test_libcuda::kSuccess : test_libcuda::kOutOfMemory;
  });
}

EXPORT int cuMemFreeHost(void* memory) {
  return test_libcuda::served_in_context([=](Simulator& cuda) {
    if (const Error error = cuda.check_safe("cuMemFreeHost"); error != 0) return error;
    const uint64_t bytes = cuda.copies().pinned_bytes(memory);
    if (bytes == 0) return test_libcuda::kInvalidValue;
    if (cuda.streams().is_touched(number(memory), bytes)) {
      return cuda.violate("cuMemFreeHost: a copy may still read the memory");
    }
    cuda.copies().free_pinned(memory);
    return test_libcuda::kSuccess;
  });
}

EXPORT int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  return test_libcuda::counted("cuMemAlloc", [=](Simulator& cuda) {
    return cuda.allocate_plain(address, test_libcuda::current_device(), bytes);
  });
}

EXPORT int cuMemFree_v2(uint64_t address) {
  return test_libcuda::served_in_context(
      [=](Simulator& cuda) { return cuda.free_plain(address, test_libcuda::current_device()); });
}

EXPORT int cuDeviceCanAccessPeer(int* can, int device, int peer) {
  return test_libcuda::served([=](Simulator& cuda) {
    const int devices = cuda.settings().devices;
    if (device < 0 || peer < 0 || device >= devices || peer >= devices) {
      return test_libcuda::kInvalidDevice;
    }
    *can = device != peer && cuda.settings().peers ? 1 : 0;
    return test_libcuda::kSuccess;
  });
}

EXPORT int cuCtxEnablePeerAccess(void* context, unsigned flags) {
  return test_libcuda::counted("cuCtxEnablePeerAccess", [=](Simulator& cuda) {
    const int peer = test_libcuda::device_of(context);
    const int device = test_libcuda::current_device();
    if (flags != 0) return test_libcuda::kInvalidValue;
    if (peer == device || !cuda.has_context(peer)) return test_libcuda::kInvalidContext;
    if (!cuda.settings().peers) return test_libcuda::kPeerUnsupported;
    return cuda.copies().enable_peer(device, peer) ? test_libcuda::kSuccess
                                                   : test_libcuda::kPeerAlreadyEnabled;
  });
}

EXPORT int cuMemcpyHtoDAsync_v2(uint64_t target, const void* source, size_t bytes, void* stream) {
  return test_libcuda::counted("cuMemcpyHtoDAsync", [=](Simulator& cuda) {
    const int device = test_libcuda::current_device();
    if (!cuda.streams().exists(number(stream), device)) return test_libcuda::kInvalidHandle;
    const Error error = cuda.check_target(device, target, bytes);
    if (error != 0) return error;
    if (!cuda.copies().is_pinned(source, bytes)) {
      // CUDA would do this slowly, and in this order. Users of this library never intend it.
      return cuda.violate("cuMemcpyHtoDAsync: the source is pageable memory");
    }
    cuda.copies().count_from_host(device, bytes);
    return submit(cuda, number(stream), {number(source), bytes}, {target, bytes}, cuda.view(target),
                  source);
  });
}

// Copies from pageable memory as well, for baselines of the library.
EXPORT int cuMemcpyHtoD_v2(uint64_t target, const void* source, size_t bytes) {
  return test_libcuda::served_in_context([=](Simulator& cuda) {
    Error error = cuda.check_synchronous("cuMemcpyHtoD");
    if (error == 0) error = cuda.check_target(test_libcuda::current_device(), target, bytes);
    if (error == 0) std::memcpy(cuda.view(target), source, bytes);
    return error;
  });
}

EXPORT int cuMemcpyDtoHAsync_v2(void* target, uint64_t source, size_t bytes, void* stream) {
  return test_libcuda::counted("cuMemcpyDtoHAsync", [=](Simulator& cuda) {
    const int device = test_libcuda::current_device();
    if (!cuda.streams().exists(number(stream), device)) return test_libcuda::kInvalidHandle;
    const Error error = cuda.check_source(device, source, bytes);
    if (error != 0) return error;
    const uint64_t name = number(stream);
    const Error submitted =
        submit(cuda, name, {source, bytes}, {number(target), bytes}, target, cuda.view(source));
    // Into pageable memory it is done before the call returns.
    const bool waits = !cuda.copies().is_pinned(target, bytes) &&
                       cuda.captures().status(name) == test_libcuda::CaptureStatus::none;
    if (submitted == 0 && waits) cuda.streams().complete(name, device, UINT64_MAX);
    return submitted;
  });
}

EXPORT int cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t bytes, void* stream) {
  return test_libcuda::counted("cuMemcpyDtoDAsync", [=](Simulator& cuda) {
    const int device = test_libcuda::current_device();
    if (!cuda.streams().exists(number(stream), device)) return test_libcuda::kInvalidHandle;
    Error error = cuda.check_target(device, target, bytes);
    if (error == 0) error = cuda.check_source(device, source, bytes);
    return error != 0 ? error : copy_between(cuda, number(stream), target, source, bytes);
  });
}

EXPORT int cuMemcpyPeerAsync(uint64_t target, void* target_context, uint64_t source,
                             void* source_context, size_t bytes, void* stream) {
  return test_libcuda::counted("cuMemcpyPeerAsync", [=](Simulator& cuda) {
    const int here = test_libcuda::current_device();
    const int to = test_libcuda::device_of(target_context);
    const int from = test_libcuda::device_of(source_context);
    if (!cuda.streams().exists(number(stream), here)) return test_libcuda::kInvalidHandle;
    Error error = cuda.check_target(to, target, bytes);
    if (error == 0) error = cuda.check_target(from, source, bytes, test_libcuda::kAccessRead);
    if (error != 0) return error;
    if (!cuda.copies().can_reach(here, to) || !cuda.copies().can_reach(here, from)) {
      return cuda.violate("cuMemcpyPeerAsync: without peer access it goes through the host");
    }
    cuda.copies().count_from_peer(to, bytes);
    return copy_between(cuda, number(stream), target, source, bytes);
  });
}

EXPORT uint64_t test_cuda_from_host_bytes(int device) {
  const std::lock_guard lock(test_libcuda::mutex());
  return Simulator::instance().copies().from_host(device);
}

EXPORT uint64_t test_cuda_from_peer_bytes(int device) {
  const std::lock_guard lock(test_libcuda::mutex());
  return Simulator::instance().copies().from_peer(device);
}

EXPORT uint64_t test_cuda_busy_devices_max() {
  const std::lock_guard lock(test_libcuda::mutex());
  return Simulator::instance().streams().busy_devices_max();
}
