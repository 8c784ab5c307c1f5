// The driver's types and numbers as its documentation gives them. The library under test has its
// own declarations, so that a mistake in one of the two shows as a refusal.
#pragma once

#include <cstddef>
#include <cstdint>

namespace test_libcuda {

enum Error {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kIllegalState = 401,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kPeerAlreadyEnabled = 704,
  kLaunchFailed = 719,
  kPeerUnsupported = 217,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureMerge = 902,
  kCaptureUnmatched = 903,
  kCaptureUnjoined = 904,
  kCaptureIsolation = 905,
  kCaptureImplicit = 906,
  kCapturedEvent = 907,
  kCaptureWrongThread = 908,
};

struct MemLocation {
  int32_t type;
  int32_t id;
};

struct MemAllocationProp {
  int32_t type;
  int32_t requested_handle_types;
  MemLocation location;
  void* win32_handle_metadata;
  uint8_t compression_type;
  uint8_t gpu_direct_rdma_capable;
  uint16_t usage;
  uint8_t reserved[4];
};

struct MemAccessDesc {
  MemLocation location;
  int32_t flags;
};

inline constexpr int kLocationDevice = 1;
inline constexpr int kAllocationPinned = 1;
inline constexpr int kAccessRead = 1;
inline constexpr int kAccessReadWrite = 3;
enum Attribute {
  kAttributeMultiprocessors = 16,
  kAttributeIntegrated = 18,
  kAttributeUnifiedAddressing = 41,
  kAttributeCapabilityMajor = 75,
  kAttributeCapabilityMinor = 76,
  kAttributeVirtualMemory = 102,
  kAttributePosixFile = 103,
};

inline constexpr int kHandlePosixFile = 1;

// Converts a handle or an address to the number in the simulator's tables, and back.
inline uint64_t number(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }
inline void* handle(uint64_t number) { return reinterpret_cast<void*>(number); }

}  // namespace test_libcuda
