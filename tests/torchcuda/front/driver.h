// The test libcuda (tests/libcuda) as the front calls it: found once, by KVCACHED_LIBCUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace torchcuda {

constexpr int kNotReady = 600;

struct Driver {
  int (*cuInit)(unsigned);
  int (*cuDeviceGetCount)(int*);
  int (*cuDevicePrimaryCtxRetain)(void**, int);
  int (*cuCtxPushCurrent_v2)(void*);
  int (*cuCtxPopCurrent_v2)(void**);
  int (*cuMemGetInfo_v2)(size_t*, size_t*);
  int (*cuMemAlloc_v2)(uint64_t*, size_t);
  int (*cuMemFree_v2)(uint64_t);
  int (*cuMemAllocHost_v2)(void**, size_t);
  int (*cuMemFreeHost)(void*);
  int (*cuMemcpyHtoDAsync_v2)(uint64_t, const void*, size_t, void*);
  int (*cuMemcpyDtoHAsync_v2)(void*, uint64_t, size_t, void*);
  int (*cuStreamCreate)(void**, unsigned);
  int (*cuStreamSynchronize)(void*);
  int (*cuStreamQuery)(void*);
  int (*cuStreamWaitEvent)(void*, void*, unsigned);
  int (*cuStreamBeginCapture_v2)(void*, int);
  int (*cuStreamEndCapture)(void*, void**);
  int (*cuThreadExchangeStreamCaptureMode)(int*);
  int (*cuGraphInstantiateWithFlags)(void**, void*, unsigned long long);
  int (*cuGraphDestroy)(void*);
  int (*cuGraphLaunch)(void*, void*);
  int (*cuGraphExecDestroy)(void*);
  int (*cuEventCreate)(void**, unsigned);
  int (*cuEventRecord)(void*, void*);
  int (*cuEventQuery)(void*);
  int (*cuEventSynchronize)(void*);
  int (*cuEventDestroy_v2)(void*);
  int (*cuGetErrorString)(int, const char**);
  uint64_t (*test_cuda_kernel_distance)();
  int (*test_cuda_kernel_start)(uint64_t);
  int (*test_cuda_launch)(uint64_t, uint64_t, uint64_t);
  int (*test_cuda_launch_over_holes)(uint64_t, uint64_t, uint64_t);
  void (*test_cuda_complete)(uint64_t, uint64_t);
};

// Loads the library at the first call. Raises RuntimeError when there is none.
const Driver& driver();

// Raises torch.AcceleratorError with CUDA's message, unless `result` is 0.
void check(int result, const char* call);

// Returns bytes as in torch's messages: "2.00 MiB".
std::string in_words(size_t bytes);

// The device of this thread, as set by cudaSetDevice.
int current_device();
void set_current_device(int device);
int device_count();

// Returns whether CUDA was initialised before this process was forked.
bool is_in_bad_fork();
void check_not_forked();
// Disables CUDA in later forked children.
void spoil_forks();
void init();

// The device's primary context is current on this thread for the length of a scope.
class OnDevice {
 public:
  explicit OnDevice(int device);
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice();
};

bool has_context(int device);

// Allows this thread calls that "global" mode forbids, for the length of a scope, as torch's
// allocator does in a capture.
class Relaxed {
 public:
  Relaxed();
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;
  ~Relaxed();

 private:
  int mode_ = 2;
};

// Streams are known by the driver's handle; 0 is a device's default one.
uint64_t current_stream(int device);
uint64_t exchange_stream(int device, uint64_t stream);
uint64_t pooled_stream(int device);
std::vector<uint64_t> streams_of(int device);

void synchronize_stream(int device, uint64_t stream);
void synchronize_device(int device);

// A kernel on the device's current stream is about to run: earlier copies of that stream are made.
void start_kernel(int device);
// The kernel may touch the range until the stream is synchronised. With `holes`, the memory is
// that of another library, and the kernel touches only what is mapped.
void launch(int device, uint64_t address, uint64_t bytes, bool holes);

}  // namespace torchcuda
