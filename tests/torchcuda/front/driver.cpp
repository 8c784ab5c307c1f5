#include "driver.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <iomanip>
#include <map>
#include <mutex>
#include <sstream>
#include <vector>

#include "graphs.h"

namespace torchcuda {

namespace {

constexpr int kDevicesMax = 16;
constexpr size_t kStreamsOfPool = 32;
// Capacity of a real channel. Another launch waits for the oldest kernels.
constexpr uint64_t kPendingMax = 1024;
constexpr unsigned kNonBlocking = 1;

std::atomic<bool> initialised = false;
std::atomic<bool> forked = false;
std::atomic<int> devices = 0;
thread_local int device_of_thread = 0;
thread_local std::array<uint64_t, kDevicesMax> stream_of_thread = {};

struct Known {
  std::mutex mutex;
  std::array<void*, kDevicesMax> contexts = {};
  std::array<std::vector<uint64_t>, kDevicesMax> pools;
  std::array<size_t, kDevicesMax> next = {};
  std::map<std::pair<int, uint64_t>, uint64_t> pending;
};

Known& known() {
  static auto* instance = new Known;
  return *instance;
}

template <typename Function>
void find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  TORCH_CHECK(function != nullptr, "the test libcuda lacks ", name);
}

Driver load() {
  const char* path = std::getenv("KVCACHED_LIBCUDA");
  void* library = dlopen(path != nullptr ? path : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK(library != nullptr, "Found no NVIDIA driver on your system: ", dlerror());
  Driver found = {};
#define FIND(name) find(library, #name, found.name)
  FIND(cuInit);
  FIND(cuDeviceGetCount);
  FIND(cuDevicePrimaryCtxRetain);
  FIND(cuCtxPushCurrent_v2);
  FIND(cuCtxPopCurrent_v2);
  FIND(cuMemGetInfo_v2);
  FIND(cuMemAlloc_v2);
  FIND(cuMemFree_v2);
  FIND(cuMemAllocHost_v2);
  FIND(cuMemFreeHost);
  FIND(cuMemcpyHtoDAsync_v2);
  FIND(cuMemcpyDtoHAsync_v2);
  FIND(cuStreamCreate);
  FIND(cuStreamSynchronize);
  FIND(cuStreamQuery);
  FIND(cuStreamWaitEvent);
  FIND(cuStreamBeginCapture_v2);
  FIND(cuStreamEndCapture);
  FIND(cuThreadExchangeStreamCaptureMode);
  FIND(cuGraphInstantiateWithFlags);
  FIND(cuGraphDestroy);
  FIND(cuGraphLaunch);
  FIND(cuGraphExecDestroy);
  FIND(cuEventCreate);
  FIND(cuEventRecord);
  FIND(cuEventQuery);
  FIND(cuEventSynchronize);
  FIND(cuEventDestroy_v2);
  FIND(cuGetErrorString);
  FIND(test_cuda_kernel_distance);
  FIND(test_cuda_kernel_start);
  FIND(test_cuda_launch);
  FIND(test_cuda_launch_over_holes);
  FIND(test_cuda_complete);
#undef FIND
  return found;
}

void* handle(uint64_t stream) { return reinterpret_cast<void*>(stream); }

void count_done(int device, uint64_t stream) { known().pending[{device, stream}] = 0; }

}  // namespace

const Driver& driver() {
  static const Driver instance = load();
  return instance;
}

void check(int result, const char* call) {
  if (result == 0) return;
  const char* text = nullptr;
  if (driver().cuGetErrorString(result, &text) != 0) text = "unrecognized error code";
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, result,
                              std::string("CUDA error: ") + text + " (" + call + ")");
}

std::string in_words(size_t bytes) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(2);
  if (bytes < (1ULL << 30)) {
    text << static_cast<double>(bytes) / (1 << 20) << " MiB";
  } else {
    text << static_cast<double>(bytes) / (1 << 30) << " GiB";
  }
  return text.str();
}

bool is_in_bad_fork() { return forked; }

void check_not_forked() {
  TORCH_CHECK(!forked,
              "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, "
              "you must use the 'spawn' start method");
}

void spoil_forks() {
  static const int once = pthread_atfork(nullptr, nullptr, [] { forked = true; });
  (void)once;
}

void init() {
  check_not_forked();
  if (initialised) return;
  check(driver().cuInit(0), "cuInit");
  int count = 0;
  check(driver().cuDeviceGetCount(&count), "cuDeviceGetCount");
  devices = count;
  initialised = true;
  spoil_forks();
}

int device_count() {
  if (forked) return 0;
  if (!initialised) init();
  return devices;
}

int current_device() { return device_of_thread; }

void set_current_device(int device) {
  init();
  if (device < 0 || device >= devices) check(101, "cudaSetDevice");
  device_of_thread = device;
  const OnDevice context(device);
}

bool has_context(int device) {
  const std::lock_guard lock(known().mutex);
  return device >= 0 && device < kDevicesMax && known().contexts[device] != nullptr;
}

OnDevice::OnDevice(int device) {
  init();
  TORCH_CHECK(device >= 0 && device < devices, "CUDA error: invalid device ordinal");
  void* context = nullptr;
  {
    const std::lock_guard lock(known().mutex);
    void*& made = known().contexts[device];
    if (made == nullptr) {
      check(driver().cuDevicePrimaryCtxRetain(&made, device), "cuDevicePrimaryCtxRetain");
    }
    context = made;
  }
  check(driver().cuCtxPushCurrent_v2(context), "cuCtxPushCurrent");
}

OnDevice::~OnDevice() {
  void* context = nullptr;
  (void)driver().cuCtxPopCurrent_v2(&context);
}

Relaxed::Relaxed() { (void)driver().cuThreadExchangeStreamCaptureMode(&mode_); }

Relaxed::~Relaxed() { (void)driver().cuThreadExchangeStreamCaptureMode(&mode_); }

uint64_t current_stream(int device) { return stream_of_thread.at(device); }

uint64_t exchange_stream(int device, uint64_t stream) {
  return std::exchange(stream_of_thread.at(device), stream);
}

uint64_t pooled_stream(int device) {
  const OnDevice context(device);
  const std::lock_guard lock(known().mutex);
  std::vector<uint64_t>& pool = known().pools[device];
  while (pool.size() < kStreamsOfPool) {
    void* made = nullptr;
    check(driver().cuStreamCreate(&made, kNonBlocking), "cuStreamCreate");
    pool.push_back(reinterpret_cast<uint64_t>(made));
  }
  return pool[known().next[device]++ % kStreamsOfPool];
}

void synchronize_stream(int device, uint64_t stream) {
  const OnDevice context(device);
  check(driver().cuStreamSynchronize(handle(stream)), "cudaStreamSynchronize");
  const std::lock_guard lock(known().mutex);
  count_done(device, stream);
}

std::vector<uint64_t> streams_of(int device) {
  const std::lock_guard lock(known().mutex);
  std::vector<uint64_t> streams = known().pools.at(device);
  streams.push_back(0);
  return streams;
}

void synchronize_device(int device) {
  for (const uint64_t stream : streams_of(device)) synchronize_stream(device, stream);
}

void start_kernel(int device) {
  if (capturing(device) != nullptr) return;
  const OnDevice context(device);
  check(driver().test_cuda_kernel_start(current_stream(device)), "launch");
}

void launch(int device, uint64_t address, uint64_t bytes, bool holes) {
  if (bytes == 0) return;
  const OnDevice context(device);
  const uint64_t stream = current_stream(device);
  const auto call = holes ? driver().test_cuda_launch_over_holes : driver().test_cuda_launch;
  check(call(stream, address, bytes), "launch: illegal memory access");
  const std::lock_guard lock(known().mutex);
  uint64_t& pending = known().pending[{device, stream}];
  if (++pending > kPendingMax) {
    driver().test_cuda_complete(stream, kPendingMax / 2);
    pending -= kPendingMax / 2;
  }
}

}  // namespace torchcuda
