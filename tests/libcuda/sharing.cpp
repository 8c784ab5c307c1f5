// Memory that several processes, or several devices of one, map.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>

#include "simulator.h"

namespace test_libcuda {

namespace {

constexpr uint64_t kLabels = uint64_t{1} << 59;  // in a device's file, after all memory

// Describes an exported allocation, at kLabels + its offset.
struct Label {
  uint64_t magic = 0x6b7663756461;
  uint64_t bytes = 0;
  int64_t gpu = -1;
  uint64_t name = 0;  // in the book
};

}  // namespace

Error Simulator::export_file(int* fd, uint64_t handle) {
  const auto found = allocations_.find(handle);
  if (found == allocations_.end() || found->second.released) {
    return refuse(kInvalidValue, "cuMemExportToShareableHandle: released or never created");
  }
  Allocation& allocation = found->second;
  if (!allocation.exportable) {
    return refuse(kInvalidValue, "cuMemExportToShareableHandle: not created to be exported");
  }
  const int gpu = gpu_of(allocation.device);
  if (allocation.shared_name == 0) {
    const uint64_t name = book_.name_shared();
    if (!book_.hold_shared(name, gpu, allocation.bytes)) {
      return refuse(kOutOfMemory, "cuMemExportToShareableHandle: the book is full");
    }
    give_driver_memory(allocation.device, allocation.bytes);
    allocation.shared_name = name;
  }
  const int device_fd = devices_[static_cast<size_t>(allocation.device)].fd;
  const Label label = {.bytes = allocation.bytes, .gpu = gpu, .name = allocation.shared_name};
  const std::string path = "/proc/self/fd/" + std::to_string(device_fd);
  *fd = open(path.c_str(), O_RDWR | O_CLOEXEC);  // with a separate position
  const auto offset = static_cast<off_t>(allocation.offset);
  const auto label_at = static_cast<off_t>(kLabels + allocation.offset);
  if (*fd < 0 || lseek(*fd, offset, SEEK_SET) != offset ||
      pwrite(*fd, &label, sizeof(label), label_at) != sizeof(label)) {
    return refuse(kOutOfMemory, "cuMemExportToShareableHandle: the OS refused");
  }
  return kSuccess;
}

Error Simulator::import_file(uint64_t* handle, int fd) {
  const off_t offset = lseek(fd, 0, SEEK_CUR);
  Label label;
  const auto label_at = static_cast<off_t>(kLabels) + offset;
  if (offset < 0 || pread(fd, &label, sizeof(label), label_at) != sizeof(label) ||
      label.magic != Label().magic) {
    return refuse(kInvalidValue, "cuMemImportFromShareableHandle: not an exported handle");
  }
  const int device = device_of_gpu(static_cast<int>(label.gpu));
  if (device < 0) {
    return refuse(kInvalidDevice, "cuMemImportFromShareableHandle: a device that is not seen here");
  }
  const int own_fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own_fd < 0) return refuse(kOutOfMemory, "cuMemImportFromShareableHandle: the OS refused");
  if (!book_.hold_shared(label.name, gpu_of(device), label.bytes)) {
    close(own_fd);
    return refuse(kOutOfMemory, "cuMemImportFromShareableHandle: the book is full");
  }
  *handle = next_handle_++;
  Allocation imported{device, label.bytes, static_cast<uint64_t>(offset)};
  imported.imported_fd = own_fd;
  imported.shared_name = label.name;
  allocations_.emplace(*handle, imported);
  return kSuccess;
}

int Simulator::device_of_gpu(int gpu) const {
  for (int device = 0; device < settings_.devices; ++device) {
    if (gpu_of(device) == gpu) return device;
  }
  return -1;
}

Error Simulator::check_source(int device, uint64_t address, uint64_t bytes) {
  if (copies_.owner_of(address, bytes) == device) return kSuccess;
  if (const Error error = check_accessible(address, bytes); error != 0) return error;
  for (uint64_t at = address; at < address + bytes;) {
    const auto& [start, mapping] = *std::prev(mappings_.upper_bound(at));
    if (mapping.reader != device) {
      return refuse(kInvalidValue, "copy: part of the range is mapped for another device");
    }
    const int owner = allocations_.at(mapping.handle).device;
    const uint64_t end = std::min(start + mapping.bytes, address + bytes);
    if (owner != device) copies_.count_from_peer(device, end - at);
    at = end;
  }
  return kSuccess;
}

}  // namespace test_libcuda
