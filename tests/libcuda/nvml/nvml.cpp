// A libnvidia-ml.so.1 for the GPUs of the test libcuda, over the same settings and the same book of
// their memory. It is a separate library: it neither needs nor initialises libcuda, and
// CUDA_VISIBLE_DEVICES changes nothing here.
#include "nvml.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>

#include "book.h"
#include "identity.h"
#include "settings.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace test_libcuda;

namespace {

constexpr uint32_t kCoresPerMultiprocessor = 128;

struct Library {
  Settings settings;
  std::unique_ptr<Book> book;
  pid_t opened_by = 0;
  int users = 0;
};

char handles[kBookGpus];  // a GPU's handle is the address of its entry

std::mutex& mutex() {
  static auto* instance = new std::mutex;
  return *instance;
}

Library& library() {
  static auto* instance = new Library;
  return *instance;
}

template <class Body>
int served(Body body) {
  const std::lock_guard lock(mutex());
  return library().users == 0 ? kNvmlUninitialized : body(library());
}

template <class Body>
int of_gpu(const void* handle, Body body) {
  return served([&](Library& nvml) {
    const auto gpu = static_cast<const char*>(handle) - handles;
    if (gpu < 0 || gpu >= nvml.settings.devices) return kNvmlInvalidArgument;
    return static_cast<NvmlResult>(body(nvml, static_cast<int>(gpu)));
  });
}

NvmlResult copy_text(const std::string& text, char* to, unsigned bytes) {
  if (text.size() >= bytes) return kNvmlInsufficientSize;
  std::memcpy(to, text.c_str(), text.size() + 1);
  return kNvmlSuccess;
}

// A forked child opens the book anew: its parent's locks are not its own.
Book* book_of(Library& nvml) {
  if (nvml.opened_by == getpid()) return nvml.book.get();
  nvml.book = std::make_unique<Book>();
  if (!nvml.book->open(nvml.settings.book, nvml.settings.teardown_ms, false)) return nullptr;
  nvml.opened_by = getpid();
  return nvml.book.get();
}

int start() {
  const std::lock_guard lock(mutex());
  Library& nvml = library();
  if (nvml.users == 0) {
    nvml.settings = read_settings();
    nvml.opened_by = 0;
  }
  if (book_of(nvml) == nullptr) return kNvmlUnknown;
  ++nvml.users;
  return kNvmlSuccess;
}

NvmlMemory memory_of(Library& nvml, int gpu) {
  const uint64_t total = nvml.settings.device_bytes;
  const uint64_t used = std::min(total, book_of(nvml)->used_bytes(gpu));
  return {total, total - used, used};
}

}  // namespace

EXPORT int nvmlInit() { return start(); }

EXPORT int nvmlInit_v2() { return start(); }

EXPORT int nvmlInitWithFlags(unsigned) { return start(); }

EXPORT int nvmlShutdown() {
  return served([](Library& nvml) {
    --nvml.users;
    return kNvmlSuccess;
  });
}

EXPORT const char* nvmlErrorString(int result) {
  switch (result) {
    case kNvmlSuccess:
      return "The operation was successful";
    case kNvmlUninitialized:
      return "Uninitialized";
    case kNvmlInvalidArgument:
      return "Invalid Argument";
    case kNvmlNotSupported:
      return "Not Supported";
    case kNvmlNotFound:
      return "Not Found";
    case kNvmlInsufficientSize:
      return "Insufficient Size";
    default:
      return "Unknown Error";
  }
}

EXPORT int nvmlSystemGetDriverVersion(char* text, unsigned bytes) {
  return served([=](Library& nvml) { return copy_text(nvml.settings.driver, text, bytes); });
}

EXPORT int nvmlSystemGetNVMLVersion(char* text, unsigned bytes) {
  return served(
      [=](Library& nvml) { return copy_text("13." + nvml.settings.driver, text, bytes); });
}

EXPORT int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  return served([=](Library& nvml) {
    *version = nvml.settings.driver_version;
    return kNvmlSuccess;
  });
}

EXPORT int nvmlSystemGetProcessName(unsigned pid, char* text, unsigned bytes) {
  return served([=](Library&) {
    char name[256] = {};
    const std::string path = "/proc/" + std::to_string(pid) + "/comm";
    FILE* const file = std::fopen(path.c_str(), "r");
    if (file == nullptr) return kNvmlNotFound;
    const bool read = std::fgets(name, sizeof(name), file) != nullptr;
    (void)std::fclose(file);
    if (!read) return kNvmlNotFound;
    name[std::strcspn(name, "\n")] = '\0';
    return copy_text(name, text, bytes);
  });
}

EXPORT int nvmlDeviceGetCount_v2(unsigned* count) {
  return served([=](Library& nvml) {
    *count = static_cast<unsigned>(nvml.settings.devices);
    return kNvmlSuccess;
  });
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
  return served([=](Library& nvml) {
    if (index >= static_cast<unsigned>(nvml.settings.devices)) return kNvmlInvalidArgument;
    *handle = handles + index;
    return kNvmlSuccess;
  });
}

EXPORT int nvmlDeviceGetHandleByUUID(const char* uuid, void** handle) {
  return served([=](Library& nvml) {
    for (int gpu = 0; gpu < nvml.settings.devices; ++gpu) {
      if (uuid_text(gpu) != uuid) continue;
      *handle = handles + gpu;
      return kNvmlSuccess;
    }
    return kNvmlNotFound;
  });
}

EXPORT int nvmlDeviceGetIndex(void* handle, unsigned* index) {
  return of_gpu(handle, [=](Library&, int gpu) {
    *index = static_cast<unsigned>(gpu);
    return kNvmlSuccess;
  });
}

EXPORT int nvmlDeviceGetUUID(void* handle, char* text, unsigned bytes) {
  return of_gpu(handle, [=](Library&, int gpu) { return copy_text(uuid_text(gpu), text, bytes); });
}

EXPORT int nvmlDeviceGetName(void* handle, char* text, unsigned bytes) {
  return of_gpu(handle,
                [=](Library& nvml, int) { return copy_text(nvml.settings.name, text, bytes); });
}

EXPORT int nvmlDeviceGetCudaComputeCapability(void* handle, int* major, int* minor) {
  return of_gpu(handle, [=](Library& nvml, int) {
    *major = nvml.settings.capability_major;
    *minor = nvml.settings.capability_minor;
    return kNvmlSuccess;
  });
}

EXPORT int nvmlDeviceGetNumGpuCores(void* handle, unsigned* cores) {
  return of_gpu(handle, [=](Library& nvml, int) {
    *cores = static_cast<unsigned>(nvml.settings.multiprocessors) * kCoresPerMultiprocessor;
    return kNvmlSuccess;
  });
}

EXPORT int nvmlDeviceGetMigMode(void* handle, unsigned* current, unsigned* pending) {
  return of_gpu(handle, [=](Library& nvml, int) {
    *current = *pending = nvml.settings.mig ? 1 : 0;
    return kNvmlSuccess;
  });
}

EXPORT int nvmlDeviceGetP2PStatus(void* handle, void* peer, int, int* status) {
  return of_gpu(handle, [=](Library& nvml, int) {
    constexpr int kOk = 0;
    constexpr int kUnsupported = 5;
    *status = nvml.settings.peers && handle != peer ? kOk : kUnsupported;
    return kNvmlSuccess;
  });
}

EXPORT int nvmlDeviceGetMemoryInfo(void* handle, NvmlMemory* memory) {
  return of_gpu(handle, [=](Library& nvml, int gpu) {
    *memory = memory_of(nvml, gpu);
    return kNvmlSuccess;
  });
}

EXPORT int nvmlDeviceGetMemoryInfo_v2(void* handle, NvmlMemoryV2* memory) {
  return of_gpu(handle, [=](Library& nvml, int gpu) {
    if (memory->version != kNvmlMemoryV2) return kNvmlInvalidArgument;
    const NvmlMemory found = memory_of(nvml, gpu);
    *memory = {kNvmlMemoryV2, found.total, 0, found.free, found.used};
    return kNvmlSuccess;
  });
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void* handle, unsigned* count,
                                                   NvmlProcess* processes) {
  return of_gpu(handle, [=](Library& nvml, int gpu) {
    const std::vector<ProcessUse> found = book_of(nvml)->processes(gpu);
    const unsigned room = *count;
    *count = static_cast<unsigned>(found.size());
    if (room < found.size()) return kNvmlInsufficientSize;
    for (size_t i = 0; i < found.size(); ++i) {
      processes[i] = {static_cast<uint32_t>(found[i].pid), found[i].bytes, kNvmlNoInstance,
                      kNvmlNoInstance};
    }
    return kNvmlSuccess;
  });
}

// There are neither graphics processes nor an MPS server.
EXPORT int nvmlDeviceGetGraphicsRunningProcesses_v3(void* handle, unsigned* count, NvmlProcess*) {
  return of_gpu(handle, [=](Library&, int) {
    *count = 0;
    return kNvmlSuccess;
  });
}

EXPORT int nvmlDeviceGetMPSComputeRunningProcesses_v3(void* handle, unsigned* count, NvmlProcess*) {
  return of_gpu(handle, [=](Library&, int) {
    *count = 0;
    return kNvmlSuccess;
  });
}
