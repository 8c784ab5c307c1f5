// The part of the CUDA driver API that vmm_cuda uses: declarations of libcuda's C interface
// (https://docs.nvidia.com/cuda/cuda-driver-api), loaded at run time. Building and importing need
// no CUDA toolkit. On a machine without a GPU, calls fail with Code::no_driver.
//
// The library is libcuda.so.1, or the one named by the environment variable KVCACHED_LIBCUDA.
// Thread rule: any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "status.h"

namespace kvcached {

using CuResult = int;
using CuOrdinal = int;      // CUdevice
using CuContext = void*;    // CUcontext
using CuStream = void*;     // CUstream; null: the default stream
using CuEvent = void*;      // CUevent
using CuHandle = uint64_t;  // CUmemGenericAllocationHandle

inline constexpr CuResult kCuSuccess = 0;
inline constexpr CuResult kCuOutOfMemory = 2;
inline constexpr CuResult kCuNotInitialized = 3;
inline constexpr CuResult kCuDeinitialized = 4;
inline constexpr CuResult kCuNoDevice = 100;
inline constexpr CuResult kCuInvalidDevice = 101;
inline constexpr CuResult kCuNotReady = 600;
inline constexpr CuResult kCuPeerAlreadyEnabled = 704;
inline constexpr CuResult kCuVersionMismatch = 803;     // CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
inline constexpr CuResult kCuCaptureUnsupported = 900;  // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
inline constexpr CuResult kCuCaptureImplicit = 906;     // CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
inline constexpr CuResult kCuCapturedEvent = 907;       // CUDA_ERROR_CAPTURED_EVENT
inline constexpr int kCuRelaxed = 2;                    // CU_STREAM_CAPTURE_MODE_RELAXED
inline constexpr int kCuPosixFile = 1;                  // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
inline constexpr unsigned kCuStreamNonBlocking = 1;     // not ordered with the default stream
inline constexpr unsigned kCuEventDisableTiming = 2;

struct CuLocation {
  int type;  // 1: a device
  int id;
};

struct CuAllocationProp {
  int type;                    // 1: pinned to its location
  int requested_handle_types;  // 0: not exportable; kCuPosixFile
  CuLocation location;
  void* win32_handle_metadata;
  unsigned char flags[8];  // compression, RDMA, usage: none
};

struct CuAccess {
  CuLocation location;
  int flags;  // 3: read and write
};

static_assert(sizeof(CuAllocationProp) == 32 && sizeof(CuAccess) == 12);

// libcuda's functions, each named after its symbol without "cu" and a version suffix.
struct CuFunctions {
  CuResult (*init)(unsigned flags);
  CuResult (*driver_get_version)(int* version);
  CuResult (*get_error_name)(CuResult error, const char** name);
  CuResult (*get_error_string)(CuResult error, const char** text);
  CuResult (*device_get_count)(int* count);
  CuResult (*device_get)(CuOrdinal* device, int ordinal);
  CuResult (*device_get_attribute)(int* value, int attribute, CuOrdinal device);
  CuResult (*device_get_name)(char* name, int bytes, CuOrdinal device);
  CuResult (*primary_ctx_retain)(CuContext* context, CuOrdinal device);
  CuResult (*primary_ctx_release)(CuOrdinal device);
  CuResult (*ctx_push_current)(CuContext context);
  CuResult (*ctx_pop_current)(CuContext* context);
  CuResult (*mem_get_allocation_granularity)(size_t* bytes, const CuAllocationProp* prop, int kind);
  CuResult (*mem_address_reserve)(uint64_t* address, size_t bytes, size_t alignment, uint64_t hint,
                                  unsigned long long flags);
  CuResult (*mem_address_free)(uint64_t address, size_t bytes);
  CuResult (*mem_create)(CuHandle* handle, size_t bytes, const CuAllocationProp* prop,
                         unsigned long long flags);
  CuResult (*mem_release)(CuHandle handle);
  CuResult (*mem_export_to_shareable_handle)(void* shared, CuHandle handle, int type,
                                             unsigned long long flags);
  CuResult (*mem_import_from_shareable_handle)(CuHandle* handle, void* shared, int type);
  CuResult (*mem_map)(uint64_t address, size_t bytes, size_t offset, CuHandle handle,
                      unsigned long long flags);
  CuResult (*mem_unmap)(uint64_t address, size_t bytes);
  CuResult (*mem_set_access)(uint64_t address, size_t bytes, const CuAccess* access, size_t count);
  CuResult (*memset_d8_async)(uint64_t address, unsigned char value, size_t bytes, CuStream stream);
  CuResult (*stream_create)(CuStream* stream, unsigned flags);
  CuResult (*stream_synchronize)(CuStream stream);
  CuResult (*stream_destroy)(CuStream stream);
  CuResult (*stream_is_capturing)(CuStream stream, int* status);
  CuResult (*thread_exchange_stream_capture_mode)(int* mode);
  CuResult (*event_create)(CuEvent* event, unsigned flags);
  CuResult (*event_record)(CuEvent event, CuStream stream);
  CuResult (*event_query)(CuEvent event);
  CuResult (*event_destroy)(CuEvent event);
  CuResult (*event_synchronize)(CuEvent event);
  CuResult (*stream_wait_event)(CuStream stream, CuEvent event, unsigned flags);
  CuResult (*mem_alloc_host)(void** memory, size_t bytes);
  CuResult (*mem_free_host)(void* memory);
  CuResult (*mem_alloc)(uint64_t* address, size_t bytes);
  CuResult (*mem_free)(uint64_t address);
  CuResult (*memcpy_htod_async)(uint64_t target, const void* source, size_t bytes, CuStream stream);
  CuResult (*memcpy_dtoh_async)(void* target, uint64_t source, size_t bytes, CuStream stream);
  CuResult (*memcpy_dtod_async)(uint64_t target, uint64_t source, size_t bytes, CuStream stream);
  CuResult (*memcpy_peer_async)(uint64_t target, CuContext target_context, uint64_t source,
                                CuContext source_context, size_t bytes, CuStream stream);
  CuResult (*device_can_access_peer)(int* can, CuOrdinal device, CuOrdinal peer);
  CuResult (*ctx_enable_peer_access)(CuContext peer, unsigned flags);
};

class CudaDriver {
 public:
  // Loads the library once per path and process, and never unloads it. Makes no call into it, so
  // that the process can still fork. Code::no_driver, with what to install, if it is missing;
  // Code::old_driver if it lacks a call.
  static Result<const CudaDriver*> load();

  // Calls cuInit. Code::forked in the child of a process that used CUDA, here or in another
  // library, because the driver does not survive a fork. Code::hidden_device or Code::no_driver if
  // no GPU is found.
  Status init() const;

  const CuFunctions& functions() const { return functions_; }
  // Ok, or a failure with the call, the driver's name of the error and its text. Code::closed once
  // the driver has shut down with its process, otherwise Code::system_call.
  Status check(CuResult result, const char* call) const;
  // Both as in "CUDA_ERROR_NO_DEVICE (100): no CUDA-capable device is detected"
  std::string describe(CuResult error) const;

 private:
  CudaDriver() = default;
  Status resolve(void* library, const std::string& path);

  CuFunctions functions_ = {};
};

}  // namespace kvcached
