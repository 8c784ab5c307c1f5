// CUDA's virtual memory management: addresses, physical memory, mappings, access.
#include <fcntl.h>
#include <unistd.h>

#include "garbage.h"
#include "simulator.h"

namespace test_libcuda {

Error Simulator::check_prop(const MemAllocationProp& prop) {
  if (!settings_.virtual_memory) return refuse(kNotSupported, "a GPU without virtual memory");
  if (prop.type != kAllocationPinned || prop.location.type != kLocationDevice ||
      (prop.requested_handle_types & ~kHandlePosixFile) != 0 ||
      prop.win32_handle_metadata != nullptr || prop.compression_type != 0 ||
      prop.gpu_direct_rdma_capable != 0 || prop.usage != 0) {
    return refuse(kInvalidValue, "allocation properties that no device has");
  }
  if (prop.location.id < 0 || prop.location.id >= settings_.devices) {
    return refuse(kInvalidDevice, "allocation on a device that does not exist");
  }
  if (prop.requested_handle_types != 0 && !settings_.exports) {
    return refuse(kNotSupported, "allocations of this device cannot be exported");
  }
  return kSuccess;
}

// CUDA's documentation names no virtual memory call among those that are unsafe during a capture.
Error Simulator::check_mappable(const char* call) {
  if (!settings_.virtual_memory) return refuse(kNotSupported, "a GPU without virtual memory");
  return settings_.capture_maps ? kSuccess : check_safe(call);
}

Error Simulator::check_size(const char* call, uint64_t address, uint64_t bytes) {
  if (const Error error = check_mappable(call); error != 0) return error;
  const uint64_t unit = settings_.granularity_bytes;
  if (bytes != 0 && bytes % unit == 0 && address % unit == 0) return kSuccess;
  return refuse(kInvalidValue, std::string(call) + ": not a multiple of the granularity");
}

bool Simulator::take_table(int device, uint64_t address) {
  constexpr uint64_t kSpan = 16 << 20;
  if (settings_.table_bytes == 0 || tables_.count({device, address / kSpan}) != 0) return true;
  if (!take_driver_memory(device, settings_.table_bytes)) return false;
  tables_.emplace(device, address / kSpan);
  return true;
}

bool Simulator::overlaps_mapping(uint64_t address, uint64_t bytes) const {
  const auto after = mappings_.lower_bound(address);
  if (after != mappings_.end() && after->first < address + bytes) return true;
  if (after == mappings_.begin()) return false;
  const auto before = std::prev(after);
  return before->first + before->second.bytes > address;
}

std::vector<Simulator::Mappings::iterator> Simulator::whole_mappings(uint64_t address,
                                                                     uint64_t bytes) {
  std::vector<Mappings::iterator> found;
  uint64_t next = address;
  for (auto at = mappings_.find(address); at != mappings_.end() && at->first == next; ++at) {
    found.push_back(at);
    next += at->second.bytes;
    if (next >= address + bytes) break;
  }
  if (next != address + bytes) found.clear();
  return found;
}

Error Simulator::reserve(uint64_t* address, uint64_t bytes, uint64_t alignment) {
  if (const Error error = check_size("cuMemAddressReserve", 0, bytes); error != 0) return error;
  if ((alignment & (alignment - 1)) != 0) {
    return refuse(kInvalidValue, "cuMemAddressReserve: the alignment is not a power of two");
  }
  const uint64_t unit =
      alignment > settings_.granularity_bytes ? alignment : settings_.granularity_bytes;
  *address = addresses_.reserve(bytes, unit);
  return *address != 0 ? kSuccess : refuse(kOutOfMemory, "cuMemAddressReserve: no address space");
}

Error Simulator::free_address(uint64_t address, uint64_t bytes) {
  if (bytes == 0 || addresses_.reserved_bytes(address) != bytes || copies_.plain(address).second) {
    return refuse(kInvalidValue, "cuMemAddressFree: not exactly what was reserved");
  }
  if (overlaps_mapping(address, bytes)) {
    return refuse(kInvalidValue, "cuMemAddressFree: something is mapped there");
  }
  addresses_.free(address);
  return kSuccess;
}

Error Simulator::create(uint64_t* handle, uint64_t bytes, const MemAllocationProp& prop) {
  if (const Error error = check_prop(prop); error != 0) return error;
  if (const Error error = check_size("cuMemCreate", 0, bytes); error != 0) return error;
  Device& device = devices_[static_cast<size_t>(prop.location.id)];
  if (!take(prop.location.id, bytes)) {
    return refuse(kOutOfMemory, "cuMemCreate: the device is full");
  }
  *handle = next_handle_++;
  if (settings_.garbage && !fill_with_garbage(device.fd, device.next_offset, bytes, *handle)) {
    give(prop.location.id, bytes);
    return refuse(kOutOfMemory, "cuMemCreate: the OS refused");
  }
  Allocation made{prop.location.id, bytes, device.next_offset};
  made.exportable = prop.requested_handle_types != 0;
  allocations_.emplace(*handle, made);
  device.next_offset += bytes;
  return kSuccess;
}

void Simulator::free_if_unused(uint64_t handle) {
  const auto found = allocations_.find(handle);
  const Allocation& allocation = found->second;
  if (!allocation.released || allocation.mappings > 0) return;
  if (allocation.imported_fd >= 0) {
    close(allocation.imported_fd);
    book_.drop_shared(allocation.shared_name);
    allocations_.erase(found);
    return;
  }
  Device& device = devices_[static_cast<size_t>(allocation.device)];
  (void)fallocate(device.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  static_cast<off_t>(allocation.offset), static_cast<off_t>(allocation.bytes));
  if (allocation.shared_name != 0) {
    book_.drop_shared(allocation.shared_name);
    device.used_bytes -= allocation.bytes;
  } else {
    give(allocation.device, allocation.bytes);
  }
  allocations_.erase(found);
}

Error Simulator::release(uint64_t handle) {
  const auto found = allocations_.find(handle);
  if (found == allocations_.end() || found->second.released) {
    return refuse(kInvalidValue, "cuMemRelease: released before, or never created");
  }
  found->second.released = true;
  free_if_unused(handle);
  return kSuccess;
}

int Simulator::file_of(const Allocation& allocation) const {
  if (allocation.imported_fd >= 0) return allocation.imported_fd;
  return devices_[static_cast<size_t>(allocation.device)].fd;
}

Error Simulator::map(uint64_t address, uint64_t bytes, uint64_t offset, uint64_t handle) {
  if (const Error error = check_size("cuMemMap", address, bytes); error != 0) return error;
  const auto found = allocations_.find(handle);
  if (found == allocations_.end() || found->second.released) {
    return refuse(kInvalidValue, "cuMemMap: a handle that was released or never created");
  }
  Allocation& allocation = found->second;
  if (offset != 0 || bytes != allocation.bytes) {
    return refuse(kInvalidValue, "cuMemMap: not the whole handle");
  }
  if (!addresses_.is_reserved(address, bytes) || is_plain(address))
    return refuse(kInvalidValue, "cuMemMap: not reserved");
  if (overlaps_mapping(address, bytes)) {
    return refuse(kInvalidValue, "cuMemMap: something is mapped there");
  }
  if (allocation.mappings > 0 && is_touched(handle)) {
    return violate("cuMemMap: a kernel may still touch the handle's memory elsewhere");
  }
  if (!take_table(allocation.device, address)) {
    return refuse(kOutOfMemory, "cuMemMap: no memory left for a page table");
  }
  if (!addresses_.show(address, bytes, file_of(allocation), allocation.offset)) {
    return refuse(kOutOfMemory, "cuMemMap: the OS refused");
  }
  mappings_.emplace(address, Mapping{bytes, handle});
  ++allocation.mappings;
  return kSuccess;
}

Error Simulator::unmap(uint64_t address, uint64_t bytes) {
  if (const Error error = check_mappable("cuMemUnmap"); error != 0) return error;
  const auto whole = whole_mappings(address, bytes);
  if (whole.empty()) return refuse(kInvalidValue, "cuMemUnmap: not a range of whole mappings");
  if (streams_.is_touched(address, bytes)) {
    return violate(
        "cuMemUnmap: a kernel may still touch the range; its event "
        "has not passed");
  }
  if (!addresses_.hide(address, bytes)) return refuse(kOutOfMemory, "cuMemUnmap: the OS refused");
  for (const auto at : whole) {
    const uint64_t handle = at->second.handle;
    mappings_.erase(at);
    --allocations_.at(handle).mappings;
    free_if_unused(handle);
  }
  return kSuccess;
}

Error Simulator::set_access(uint64_t address, uint64_t bytes, const MemAccessDesc& access) {
  const bool read = access.flags == kAccessRead && settings_.read_only;
  if (access.location.type != kLocationDevice || (!read && access.flags != kAccessReadWrite)) {
    return refuse(kInvalidValue, "cuMemSetAccess: an access that is not supported here");
  }
  const auto whole = whole_mappings(address, bytes);
  if (whole.empty()) return refuse(kInvalidValue, "cuMemSetAccess: not a range of whole mappings");
  for (const auto at : whole) {
    const Allocation& memory = allocations_.at(at->second.handle);
    const bool is_own = memory.device == access.location.id;
    // Between devices, memory of this process is copied by peer access and never mapped.
    if (!is_own && !(memory.imported_fd >= 0 && settings_.peers)) {
      return refuse(kInvalidDevice, "cuMemSetAccess: memory of another device");
    }
  }
  if (!addresses_.protect(address, bytes, !read)) {
    return refuse(kOutOfMemory, "cuMemSetAccess: the OS refused");
  }
  for (const auto at : whole) {
    at->second.access = access.flags;
    at->second.reader = access.location.id;
  }
  return kSuccess;
}

Error Simulator::get_access(uint64_t address, unsigned long long* flags) {
  if (!overlaps_mapping(address, 1)) return refuse(kInvalidValue, "cuMemGetAccess: not mapped");
  const Mapping& mapping = std::prev(mappings_.upper_bound(address))->second;
  *flags = static_cast<unsigned>(mapping.access);
  return kSuccess;
}

}  // namespace test_libcuda
