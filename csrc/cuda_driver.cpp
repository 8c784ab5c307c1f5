#include "cuda_driver.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>

namespace kvcached {

namespace {

constexpr const char* kDefaultPath = "libcuda.so.1";
constexpr const char* kPathVariable = "KVCACHED_LIBCUDA";
constexpr int kOldestVersion = 10020;  // CUDA 10.2, the first with virtual memory management
constexpr const char* kVisibleVariable = "CUDA_VISIBLE_DEVICES";

Status no_driver(const std::string& why) {
  return failure(Code::no_driver, "a cuda device needs NVIDIA's driver: ", why,
                 "; install the driver (in a container, start it with GPU access), or use a "
                 "host device such as 'host:0'");
}

Status old_driver(const std::string& why) {
  return failure(Code::old_driver, "NVIDIA's driver is too old: ", why,
                 "; install the driver of CUDA 11.4 or later (470), or use a host "
                 "device such as 'host:0'");
}

// Happens after an update of the driver without a reboot, or in a container with its own libcuda.
Status mismatched_driver(const std::string& why) {
  return failure(Code::no_driver,
                 "libcuda and the kernel's NVIDIA driver are of different versions: ", why,
                 "; reboot or reload the driver's modules (in a container, use the host's "
                 "libcuda), or use a host device such as 'host:0'");
}

Status forked() {
  return failure(Code::forked,
                 "CUDA was initialised before this process was forked, and does not survive a "
                 "fork; start a fresh process (spawn), or fork before anything uses CUDA");
}

// Failure for a driver that is installed but shows no GPU.
Status no_gpu(const std::string& why) {
  const char* visible = std::getenv(kVisibleVariable);
  if (visible == nullptr) return no_driver(why);
  return failure(Code::hidden_device, "the driver shows no GPU, as CUDA_VISIBLE_DEVICES is '",
                 std::string(visible), "'; name the GPUs to use there, or unset it (", why, ")");
}

std::string library_path() {
  const char* path = std::getenv(kPathVariable);
  return path != nullptr && *path != '\0' ? path : kDefaultPath;
}

// dlerror() may be null.
std::string loader_error() {
  const char* text = dlerror();
  return text != nullptr ? text : "unknown loader error";
}

}  // namespace

Result<const CudaDriver*> CudaDriver::load() {
  static std::mutex mutex;
  static auto* loaded = new std::map<std::string, const CudaDriver*>;  // outlives every client
  const std::string path = library_path();
  const std::lock_guard lock(mutex);
  if (const auto found = loaded->find(path); found != loaded->end()) return found->second;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return no_driver(loader_error());
  auto* driver = new CudaDriver;
  if (Status status = driver->resolve(library, path); !status.ok()) {
    delete driver;
    dlclose(library);
    return status;
  }
  loaded->emplace(path, driver);
  return static_cast<const CudaDriver*>(driver);
}

Status CudaDriver::resolve(void* library, const std::string& path) {
  Status outcome;
  const auto find = [&](auto& function, const char* symbol) {
    void* address = dlsym(library, symbol);
    if (address == nullptr && outcome.ok()) {
      outcome = old_driver(path + " has no " + symbol);
    }
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
  };
  find(functions_.init, "cuInit");
  find(functions_.driver_get_version, "cuDriverGetVersion");
  find(functions_.get_error_name, "cuGetErrorName");
  find(functions_.get_error_string, "cuGetErrorString");
  find(functions_.device_get_count, "cuDeviceGetCount");
  find(functions_.device_get, "cuDeviceGet");
  find(functions_.device_get_attribute, "cuDeviceGetAttribute");
  find(functions_.device_get_name, "cuDeviceGetName");
  find(functions_.primary_ctx_retain, "cuDevicePrimaryCtxRetain");
  find(functions_.primary_ctx_release, "cuDevicePrimaryCtxRelease_v2");
  find(functions_.ctx_push_current, "cuCtxPushCurrent_v2");
  find(functions_.ctx_pop_current, "cuCtxPopCurrent_v2");
  find(functions_.mem_get_allocation_granularity, "cuMemGetAllocationGranularity");
  find(functions_.mem_address_reserve, "cuMemAddressReserve");
  find(functions_.mem_address_free, "cuMemAddressFree");
  find(functions_.mem_create, "cuMemCreate");
  find(functions_.mem_release, "cuMemRelease");
  find(functions_.mem_export_to_shareable_handle, "cuMemExportToShareableHandle");
  find(functions_.mem_import_from_shareable_handle, "cuMemImportFromShareableHandle");
  find(functions_.mem_map, "cuMemMap");
  find(functions_.mem_unmap, "cuMemUnmap");
  find(functions_.mem_set_access, "cuMemSetAccess");
  find(functions_.memset_d8_async, "cuMemsetD8Async");
  find(functions_.stream_create, "cuStreamCreate");
  find(functions_.stream_synchronize, "cuStreamSynchronize");
  find(functions_.stream_destroy, "cuStreamDestroy_v2");
  find(functions_.stream_is_capturing, "cuStreamIsCapturing");
  find(functions_.thread_exchange_stream_capture_mode, "cuThreadExchangeStreamCaptureMode");
  find(functions_.event_create, "cuEventCreate");
  find(functions_.event_record, "cuEventRecord");
  find(functions_.event_query, "cuEventQuery");
  find(functions_.event_destroy, "cuEventDestroy_v2");
  find(functions_.event_synchronize, "cuEventSynchronize");
  find(functions_.stream_wait_event, "cuStreamWaitEvent");
  find(functions_.mem_alloc_host, "cuMemAllocHost_v2");
  find(functions_.mem_free_host, "cuMemFreeHost");
  find(functions_.mem_alloc, "cuMemAlloc_v2");
  find(functions_.mem_free, "cuMemFree_v2");
  find(functions_.memcpy_htod_async, "cuMemcpyHtoDAsync_v2");
  find(functions_.memcpy_dtoh_async, "cuMemcpyDtoHAsync_v2");
  find(functions_.memcpy_dtod_async, "cuMemcpyDtoDAsync_v2");
  find(functions_.memcpy_peer_async, "cuMemcpyPeerAsync");
  find(functions_.device_can_access_peer, "cuDeviceCanAccessPeer");
  find(functions_.ctx_enable_peer_access, "cuCtxEnablePeerAccess");
  return outcome;
}

Status CudaDriver::init() const {
  static std::atomic<pid_t> user = 0;  // the process that called cuInit first
  pid_t first = 0;
  if (!user.compare_exchange_strong(first, getpid()) && first != getpid()) return forked();
  int version = 0;
  if (functions_.driver_get_version(&version) == kCuSuccess && version < kOldestVersion) {
    return old_driver("it is of CUDA " + std::to_string(version / 1000) + "." +
                      std::to_string(version % 1000 / 10));
  }
  const CuResult result = functions_.init(0);
  if (result == kCuSuccess) return {};
  const std::string why = "cuInit: " + describe(result);
  // Another library of this process used CUDA before the fork.
  if (result == kCuNotInitialized) return forked();
  if (result == kCuNoDevice) return no_gpu(why);
  if (result == kCuVersionMismatch) return mismatched_driver(why);
  return no_driver(why);
}

std::string CudaDriver::describe(CuResult error) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (functions_.get_error_name(error, &name) != kCuSuccess || name == nullptr) name = "CUDA error";
  if (functions_.get_error_string(error, &text) != kCuSuccess || text == nullptr) text = "no text";
  return std::string(name) + " (" + std::to_string(error) + "): " + text;
}

Status CudaDriver::check(CuResult result, const char* call) const {
  if (result == kCuSuccess) return {};
  // The process is exiting, and the driver has freed all its memory.
  const Code code = result == kCuDeinitialized ? Code::closed : Code::system_call;
  return failure(code, std::string(call) + ": " + describe(result));
}

}  // namespace kvcached
