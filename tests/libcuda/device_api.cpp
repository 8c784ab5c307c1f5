// libcuda's facts on the driver and its devices.
#include <cstring>

#include "identity.h"
#include "served.h"

using test_libcuda::Error;
using test_libcuda::served;
using test_libcuda::Settings;
using test_libcuda::Simulator;

namespace {

constexpr int kNoAttribute = -1;

int attribute_of(const Settings& settings, int attribute) {
  switch (attribute) {
    case test_libcuda::kAttributeMultiprocessors:
      return settings.multiprocessors;
    case test_libcuda::kAttributeIntegrated:
      return 0;
    case test_libcuda::kAttributeUnifiedAddressing:
      return 1;
    case test_libcuda::kAttributeCapabilityMajor:
      return settings.capability_major;
    case test_libcuda::kAttributeCapabilityMinor:
      return settings.capability_minor;
    case test_libcuda::kAttributeVirtualMemory:
      return settings.virtual_memory ? 1 : 0;
    case test_libcuda::kAttributePosixFile:
      return settings.virtual_memory && settings.exports ? 1 : 0;
    default:
      return kNoAttribute;
  }
}

template <class Body>
int of_device(int device, Body body) {
  return served([&](Simulator& cuda) {
    if (device < 0 || device >= cuda.settings().devices) return test_libcuda::kInvalidDevice;
    return body(cuda);
  });
}

}  // namespace

// Answers without cuInit as well.
EXPORT int cuDriverGetVersion(int* version) {
  *version = test_libcuda::read_settings().driver_version;
  return test_libcuda::kSuccess;
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

EXPORT int cuDeviceGetAttribute(int* value, int attribute, int device) {
  return of_device(device, [=](Simulator& cuda) {
    const int found = attribute_of(cuda.settings(), attribute);
    if (found == kNoAttribute) return test_libcuda::kInvalidValue;
    *value = found;
    return test_libcuda::kSuccess;
  });
}

EXPORT int cuDeviceGetName(char* name, int bytes, int device) {
  return of_device(device, [=](Simulator& cuda) {
    if (bytes <= 0) return test_libcuda::kInvalidValue;
    std::strncpy(name, cuda.settings().name.c_str(), static_cast<size_t>(bytes));
    name[bytes - 1] = '\0';
    return test_libcuda::kSuccess;
  });
}

EXPORT int cuDeviceTotalMem_v2(size_t* bytes, int device) {
  return of_device(device, [=](Simulator& cuda) {
    *bytes = cuda.settings().device_bytes;
    return test_libcuda::kSuccess;
  });
}

EXPORT int cuDeviceGetUuid_v2(void* uuid, int device) {
  return of_device(device, [=](Simulator& cuda) {
    const test_libcuda::Uuid found = test_libcuda::uuid_of(cuda.gpu_of(device));
    std::memcpy(uuid, found.data(), found.size());
    return test_libcuda::kSuccess;
  });
}
