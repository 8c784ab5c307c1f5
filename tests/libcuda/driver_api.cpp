// libcuda's symbols, as far as kvcached and its tests use them, over the simulator.
#include <dlfcn.h>

#include <algorithm>
#include <cstring>

#include "served.h"

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

// A context is the address of its device's entry.
char contexts[64];
thread_local int stack[kMaxContexts];
thread_local int depth = 0;

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

EXPORT int cuCtxGetCurrent(void** context) {
  return served([=](Simulator&) {
    *context = depth > 0 ? contexts + stack[depth - 1] : nullptr;
    return test_libcuda::kSuccess;
  });
}

// Null pops the current one.
EXPORT int cuCtxSetCurrent(void* context) {
  return served([=](Simulator& cuda) {
    if (context == nullptr) {
      if (depth > 0) --depth;
      return test_libcuda::kSuccess;
    }
    if (!cuda.has_context(device_of(context))) return test_libcuda::kInvalidContext;
    if (depth == 0) ++depth;
    stack[depth - 1] = device_of(context);
    return test_libcuda::kSuccess;
  });
}

EXPORT int cuCtxGetDevice(int* device) {
  return served([=](Simulator&) {
    if (depth == 0) return test_libcuda::kInvalidContext;
    *device = stack[depth - 1];
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
    *free = *total - std::min(*total, cuda.device_used_bytes(stack[depth - 1]));
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

// Runs after the work of the default stream.
EXPORT int cuMemcpyDtoH_v2(void* target, uint64_t address, size_t bytes) {
  return served_in_context([=](Simulator& cuda) {
    Error error = cuda.check_synchronous("cuMemcpyDtoH");
    if (error == 0) error = cuda.check_accessible(address, bytes);
    if (error != 0) return error;
    cuda.streams().complete(0, test_libcuda::current_device(), UINT64_MAX);
    std::memcpy(target, cuda.view(address), bytes);
    return test_libcuda::kSuccess;
  });
}

// Asynchronous, although its name does not say so.
EXPORT int cuMemsetD8_v2(uint64_t address, unsigned char value, size_t bytes) {
  return served_in_context([=](Simulator& cuda) {
    const Error error = cuda.check_synchronous("cuMemsetD8");
    return error != 0 ? error : cuda.fill(address, value, bytes, 0);
  });
}
