// libcuda's symbols, as far as kvcached and its tests use them, over the simulator.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "control.h"
#include "served.h"

using test_libcuda::CallLog;
using test_libcuda::counted;
using test_libcuda::device_of;
using test_libcuda::Error;
using test_libcuda::MemAccessDesc;
using test_libcuda::MemAllocationProp;
using test_libcuda::MemLocation;
using test_libcuda::mutex;
using test_libcuda::served;
using test_libcuda::served_in_context;
using test_libcuda::Simulator;

namespace {

constexpr int kMaxContexts = 16;
constexpr int kExitLeaked = 97;

// A context is the address of its device's entry.
char contexts[64];
thread_local int stack[kMaxContexts];
thread_local int depth = 0;

struct NamedError {
  int error;
  const char* name;
  const char* text;
};

constexpr NamedError kErrors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported between these two"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
};

const NamedError* find_error(int error) {
  for (const NamedError& entry : kErrors) {
    if (entry.error == error) return &entry;
  }
  return nullptr;
}

// KVCACHED_TEST_CUDA_LEAKS=report says what is left when the process ends; =fail also ends it
// with status 97.
__attribute__((destructor)) void report_leaks() {
  const char* wanted = std::getenv("KVCACHED_TEST_CUDA_LEAKS");
  const std::string leaks = Simulator::instance().leaks();
  if (wanted == nullptr || leaks.empty()) return;
  std::fprintf(stderr, "test libcuda: leaked %s\n", leaks.c_str());
  std::fflush(nullptr);
  if (std::strcmp(wanted, "fail") == 0) _exit(kExitLeaked);
}

}  // namespace

std::mutex& test_libcuda::mutex() {
  static auto* instance = new std::mutex;
  return *instance;
}

int test_libcuda::device_of(const void* context) {
  return static_cast<int>(static_cast<const char*>(context) - contexts);
}

int test_libcuda::current_device() { return depth > 0 ? stack[depth - 1] : -1; }

EXPORT int cuInit(unsigned flags) {
  if (flags != 0) return test_libcuda::kInvalidValue;
  const std::lock_guard lock(mutex());
  return Simulator::instance().init();
}

EXPORT int cuGetErrorName(int error, const char** name) {
  const NamedError* found = find_error(error);
  *name = found != nullptr ? found->name : nullptr;
  return found != nullptr ? test_libcuda::kSuccess : test_libcuda::kInvalidValue;
}

EXPORT int cuGetErrorString(int error, const char** text) {
  const NamedError* found = find_error(error);
  *text = found != nullptr ? found->text : nullptr;
  return found != nullptr ? test_libcuda::kSuccess : test_libcuda::kInvalidValue;
}

// NVIDIA's own bindings find everything through this one; newer forms of a name come first.
EXPORT int cuGetProcAddress_v2(const char* symbol, void** function, int, uint64_t, int* found) {
  Dl_info self = {};
  if (dladdr(contexts, &self) == 0) return test_libcuda::kInvalidValue;
  void* library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  *function = dlsym(library, (std::string(symbol) + "_v2").c_str());
  if (*function == nullptr) *function = dlsym(library, symbol);
  dlclose(library);
  constexpr int kSymbolNotFound = 1;
  if (found != nullptr) *found = *function != nullptr ? 0 : kSymbolNotFound;
  return *function != nullptr ? test_libcuda::kSuccess : test_libcuda::kNotFound;
}

EXPORT int cuDeviceGetCount(int* count) {
  return served([=](Simulator& cuda) {
    *count = cuda.settings().devices;
    return test_libcuda::kSuccess;
  });
}

EXPORT int cuDeviceGet(int* device, int ordinal) {
  return served([=](Simulator& cuda) {
    if (ordinal < 0 || ordinal >= cuda.settings().devices) return test_libcuda::kInvalidDevice;
    *device = ordinal;
    return test_libcuda::kSuccess;
  });
}

EXPORT int cuDeviceGetAttribute(int* value, int attribute, int) {
  return served([=](Simulator& cuda) {
    const bool exports = attribute == test_libcuda::kAttributePosixFile;
    if (!exports && attribute != test_libcuda::kAttributeVirtualMemory) {
      return test_libcuda::kInvalidValue;
    }
    *value = !exports || cuda.settings().exports ? 1 : 0;
    return test_libcuda::kSuccess;
  });
}

EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
  return served([=](Simulator& cuda) {
    const Error error = cuda.retain_context(device);
    if (error == 0) *context = contexts + device;
    return error;
  });
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
  return served([=](Simulator& cuda) { return cuda.release_context(device); });
}

EXPORT int cuCtxPushCurrent_v2(void* context) {
  return served([=](Simulator& cuda) {
    if (!cuda.has_context(device_of(context))) return test_libcuda::kInvalidContext;
    if (depth == kMaxContexts) return test_libcuda::kInvalidValue;
    stack[depth++] = device_of(context);
    return test_libcuda::kSuccess;
  });
}

EXPORT int cuCtxPopCurrent_v2(void** context) {
  return served([=](Simulator&) {
    if (depth == 0) return test_libcuda::kInvalidContext;
    *context = contexts + stack[--depth];
    return test_libcuda::kSuccess;
  });
}

EXPORT int cuMemGetAllocationGranularity(size_t* bytes, const MemAllocationProp* prop, int) {
  return served([=](Simulator& cuda) {
    const Error error = cuda.check_prop(*prop);
    if (error == 0) *bytes = cuda.settings().granularity_bytes;
    return error;
  });
}

EXPORT int cuMemGetInfo_v2(size_t* free, size_t* total) {
  return served_in_context([=](Simulator& cuda) {
    *total = cuda.settings().device_bytes;
    *free = *total - cuda.used_bytes(stack[depth - 1]);
    return test_libcuda::kSuccess;
  });
}

EXPORT int cuMemAddressReserve(uint64_t* address, size_t bytes, size_t alignment, uint64_t hint,
                               unsigned long long flags) {
  return counted("cuMemAddressReserve", [=](Simulator& cuda) {
    if (hint != 0 || flags != 0) return test_libcuda::kInvalidValue;
    return cuda.reserve(address, bytes, alignment);
  });
}

EXPORT int cuMemAddressFree(uint64_t address, size_t bytes) {
  return counted("cuMemAddressFree",
                 [=](Simulator& cuda) { return cuda.free_address(address, bytes); });
}

EXPORT int cuMemCreate(uint64_t* handle, size_t bytes, const MemAllocationProp* prop,
                       unsigned long long flags) {
  return counted("cuMemCreate", [=](Simulator& cuda) {
    return flags != 0 ? test_libcuda::kInvalidValue : cuda.create(handle, bytes, *prop);
  });
}

EXPORT int cuMemRelease(uint64_t handle) {
  return counted("cuMemRelease", [=](Simulator& cuda) { return cuda.release(handle); });
}

EXPORT int cuMemExportToShareableHandle(void* shared, uint64_t handle, int type,
                                        unsigned long long flags) {
  return counted("cuMemExportToShareableHandle", [=](Simulator& cuda) {
    if (type != test_libcuda::kHandlePosixFile || flags != 0) return test_libcuda::kInvalidValue;
    return cuda.export_file(static_cast<int*>(shared), handle);
  });
}

EXPORT int cuMemImportFromShareableHandle(uint64_t* handle, void* shared, int type) {
  return counted("cuMemImportFromShareableHandle", [=](Simulator& cuda) {
    if (type != test_libcuda::kHandlePosixFile) return test_libcuda::kInvalidValue;
    return cuda.import_file(handle, static_cast<int>(reinterpret_cast<intptr_t>(shared)));
  });
}

EXPORT int cuMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle,
                    unsigned long long flags) {
  return counted("cuMemMap", [=](Simulator& cuda) {
    return flags != 0 ? test_libcuda::kInvalidValue : cuda.map(address, bytes, offset, handle);
  });
}

EXPORT int cuMemUnmap(uint64_t address, size_t bytes) {
  return counted("cuMemUnmap", [=](Simulator& cuda) { return cuda.unmap(address, bytes); });
}

EXPORT int cuMemSetAccess(uint64_t address, size_t bytes, const MemAccessDesc* access,
                          size_t count) {
  return counted("cuMemSetAccess", [=](Simulator& cuda) {
    return count != 1 ? test_libcuda::kInvalidValue : cuda.set_access(address, bytes, *access);
  });
}

EXPORT int cuMemGetAccess(unsigned long long* flags, const MemLocation*, uint64_t address) {
  return served([=](Simulator& cuda) { return cuda.get_access(address, flags); });
}

EXPORT int cuMemcpyDtoH_v2(void* target, uint64_t address, size_t bytes) {
  return served_in_context([=](Simulator& cuda) {
    const Error error = cuda.check_accessible(address, bytes);
    if (error == 0) std::memcpy(target, reinterpret_cast<const void*>(address), bytes);
    return error;
  });
}

EXPORT int cuMemsetD8_v2(uint64_t address, unsigned char value, size_t bytes) {
  return served_in_context([=](Simulator& cuda) {
    const Error error = cuda.check_fillable(address, bytes);
    if (error == 0) std::memset(reinterpret_cast<void*>(address), value, bytes);
    return error;
  });
}

EXPORT uint64_t test_cuda_calls(const char* function) {
  const std::lock_guard lock(mutex());
  return CallLog::instance().count(function);
}

EXPORT void test_cuda_reset_calls() {
  const std::lock_guard lock(mutex());
  CallLog::instance().reset();
}

EXPORT void test_cuda_fail_at(uint64_t call, uint64_t times, int error) {
  const std::lock_guard lock(mutex());
  CallLog::instance().fail_at(call, times, error);
}

EXPORT void test_cuda_lose(int device, uint64_t calls) {
  const std::lock_guard lock(mutex());
  CallLog::instance().lose(device, calls);
}

EXPORT uint64_t test_cuda_used_bytes(int device) {
  const std::lock_guard lock(mutex());
  return Simulator::instance().used_bytes(device);
}

EXPORT const char* test_cuda_refusal() {
  const std::lock_guard lock(mutex());
  return Simulator::instance().refusal().c_str();
}

EXPORT const char* test_cuda_leaks() {
  static thread_local std::string leaks;
  const std::lock_guard lock(mutex());
  leaks = Simulator::instance().leaks();
  return leaks.c_str();
}
