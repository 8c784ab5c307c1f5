// NVML's types and numbers as its documentation gives them.
#pragma once

#include <cstdint>

namespace test_libcuda {

enum NvmlResult {
  kNvmlSuccess = 0,
  kNvmlUninitialized = 1,
  kNvmlInvalidArgument = 2,
  kNvmlNotSupported = 3,
  kNvmlNotFound = 6,
  kNvmlInsufficientSize = 7,
  kNvmlUnknown = 999,
};

struct NvmlMemory {
  uint64_t total;
  uint64_t free;
  uint64_t used;
};

struct NvmlMemoryV2 {
  uint32_t version;
  uint64_t total;
  uint64_t reserved;
  uint64_t free;
  uint64_t used;
};

inline constexpr uint32_t kNvmlMemoryV2 = sizeof(NvmlMemoryV2) | 2U << 24;

struct NvmlProcess {
  uint32_t pid;
  uint64_t used_bytes;
  uint32_t gpu_instance;
  uint32_t compute_instance;
};

inline constexpr uint32_t kNvmlNoInstance = 0xFFFFFFFF;

}  // namespace test_libcuda
