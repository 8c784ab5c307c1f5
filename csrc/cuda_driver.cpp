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

Status unavailable(const std::string& why) {
  return failure(Code::unavailable,
                 "a cuda device needs NVIDIA's driver: " + why +
                     "; install the driver (in a container, start it with GPU access), or use a "
                     "host device such as 'host:0'");
}

std::string library_path() {
  const char* path = std::getenv(kPathVariable);
  return path != nullptr && *path != '\0' ? path : kDefaultPath;
}

// dlerror() may be null when the loader has nothing to say.
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
  if (library == nullptr) return unavailable(loader_error());
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
      outcome = unavailable(path + " has no " + symbol + " and is no usable driver");
    }
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
  };
  find(functions_.init, "cuInit");
  find(functions_.get_error_name, "cuGetErrorName");
  find(functions_.get_error_string, "cuGetErrorString");
  find(functions_.device_get_count, "cuDeviceGetCount");
  find(functions_.device_get, "cuDeviceGet");
  find(functions_.device_get_attribute, "cuDeviceGetAttribute");
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
  find(functions_.memcpy_dtod_async, "cuMemcpyDtoDAsync_v2");
  find(functions_.memcpy_peer_async, "cuMemcpyPeerAsync");
  find(functions_.device_can_access_peer, "cuDeviceCanAccessPeer");
  find(functions_.ctx_enable_peer_access, "cuCtxEnablePeerAccess");
  return outcome;
}

Status CudaDriver::init() const {
  static std::atomic<pid_t> user = 0;  // the process that called cuInit first
  pid_t first = 0;
  if (!user.compare_exchange_strong(first, getpid()) && first != getpid()) {
    return failure(Code::forked,
                   "this process was forked from one that had used CUDA, which does not survive "
                   "a fork; fork before the first client is opened, or spawn");
  }
  const CuResult result = functions_.init(0);
  return result == kCuSuccess ? Status{} : unavailable("cuInit: " + describe(result));
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
  // The process is ending, and all that it held is given back already.
  const Code code = result == kCuDeinitialized ? Code::closed : Code::system_call;
  return failure(code, std::string(call) + ": " + describe(result));
}

}  // namespace kvcached
