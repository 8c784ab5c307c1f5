#include "simulator.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>

namespace test_libcuda {

namespace {

constexpr uint64_t kFileBytes = uint64_t{1} << 60;
uint64_t setting(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? otherwise : std::strtoull(text, nullptr, 0);
}

Settings read_settings() {
  Settings settings;
  settings.devices =
      static_cast<int>(setting("KVCACHED_TEST_CUDA_DEVICES", uint64_t(settings.devices)));
  settings.device_bytes = setting("KVCACHED_TEST_CUDA_BYTES", settings.device_bytes);
  settings.granularity_bytes =
      setting("KVCACHED_TEST_CUDA_GRANULARITY", settings.granularity_bytes);
  settings.read_only = setting("KVCACHED_TEST_CUDA_READ_ONLY", 1) != 0;
  settings.peers = setting("KVCACHED_TEST_CUDA_PEERS", 1) != 0;
  settings.exports = setting("KVCACHED_TEST_CUDA_EXPORTS", 1) != 0;
  return settings;
}

void* pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

bool make_hole(uint64_t address, uint64_t bytes) {
  return mmap(pointer(address), bytes, PROT_NONE,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED;
}

int make_memory() {
  const int fd = memfd_create("test-libcuda", MFD_CLOEXEC);
  return fd >= 0 && ftruncate(fd, static_cast<off_t>(kFileBytes)) == 0 ? fd : -1;
}

}  // namespace

Simulator& Simulator::instance() {
  static auto* simulator = new Simulator;  // outlives every client
  return *simulator;
}

Error Simulator::init() {
  if (dead_) return kNotInitialized;
  if (initialised_) return kSuccess;
  settings_ = read_settings();
  if (settings_.devices == 0) return refuse(kNoDevice, "cuInit: no device");
  devices_.resize(static_cast<size_t>(settings_.devices));
  for (Device& device : devices_) {
    device.fd = make_memory();
    if (device.fd < 0) return refuse(kOutOfMemory, "cuInit: no memory file");
  }
  pthread_atfork(nullptr, nullptr, abandon_in_child);
  initialised_ = true;
  return kSuccess;
}

void Simulator::abandon_in_child() {
  Simulator& self = instance();
  self.dead_ = true;
  for (const Device& device : self.devices_) close(device.fd);
}

Error Simulator::check_usable() const {
  return initialised_ && !dead_ ? kSuccess : kNotInitialized;
}

Error Simulator::refuse(Error error, std::string why) {
  refusal_ = std::move(why);
  return error;
}

Error Simulator::violate(std::string why) {
  ++violations_;
  return refuse(kInvalidValue, std::move(why));
}

bool Simulator::is_touched(uint64_t handle) const {
  for (const auto& [address, mapping] : mappings_) {
    if (mapping.handle == handle && streams_.is_touched(address, mapping.bytes)) return true;
  }
  return false;
}

uint64_t Simulator::used_bytes(int device) const {
  const auto index = static_cast<size_t>(device);
  return index < devices_.size() ? devices_[index].used_bytes : 0;
}

std::string Simulator::leaks() const {
  if (dead_) return "";
  int contexts = 0;
  for (const Device& device : devices_) contexts += device.context_uses;
  const size_t streams = streams_.streams();
  const size_t events = streams_.events();
  const size_t buffers = copies_.pinned_ranges() + copies_.plain_ranges();
  if (allocations_.empty() && mappings_.empty() && reservations_.empty() && contexts == 0 &&
      streams == 0 && events == 0 && buffers == 0) {
    return "";
  }
  return std::to_string(allocations_.size()) + " allocations, " + std::to_string(mappings_.size()) +
         " mappings, " + std::to_string(reservations_.size()) + " reservations, " +
         std::to_string(contexts) + " contexts, " + std::to_string(streams) + " streams, " +
         std::to_string(events) + " events, " + std::to_string(buffers) + " buffers";
}

Error Simulator::retain_context(int device) {
  if (device < 0 || device >= settings_.devices) return refuse(kInvalidDevice, "no such device");
  ++devices_[static_cast<size_t>(device)].context_uses;
  return kSuccess;
}

Error Simulator::release_context(int device) {
  if (!has_context(device)) return refuse(kInvalidContext, "the context was not retained");
  if (--devices_[static_cast<size_t>(device)].context_uses == 0) copies_.forget_device(device);
  return kSuccess;
}

bool Simulator::has_context(int device) const {
  return device >= 0 && device < settings_.devices &&
         devices_[static_cast<size_t>(device)].context_uses > 0;
}

Error Simulator::check_prop(const MemAllocationProp& prop) {
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

Error Simulator::check_size(const char* call, uint64_t address, uint64_t bytes) {
  const uint64_t unit = settings_.granularity_bytes;
  if (bytes != 0 && bytes % unit == 0 && address % unit == 0) return kSuccess;
  return refuse(kInvalidValue, std::string(call) + ": not a multiple of the granularity");
}

bool Simulator::is_reserved(uint64_t address, uint64_t bytes) const {
  auto after = reservations_.upper_bound(address);
  if (after == reservations_.begin()) return false;
  const auto& [start, size] = *std::prev(after);
  return address - start < size && bytes <= size - (address - start);
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
  const uint64_t padded = bytes + unit;
  void* raw = mmap(nullptr, padded, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return refuse(kOutOfMemory, "cuMemAddressReserve: no address space");
  const auto begin = reinterpret_cast<uint64_t>(raw);
  *address = (begin + unit - 1) / unit * unit;
  if (*address > begin) munmap(raw, *address - begin);
  if (begin + padded > *address + bytes) {
    munmap(pointer(*address + bytes), begin + padded - *address - bytes);
  }
  reservations_.emplace(*address, bytes);
  return kSuccess;
}

Error Simulator::free_address(uint64_t address, uint64_t bytes) {
  const auto found = reservations_.find(address);
  if (found == reservations_.end() || found->second != bytes) {
    return refuse(kInvalidValue, "cuMemAddressFree: not exactly what was reserved");
  }
  if (overlaps_mapping(address, bytes)) {
    return refuse(kInvalidValue, "cuMemAddressFree: something is mapped there");
  }
  munmap(pointer(address), bytes);
  reservations_.erase(found);
  return kSuccess;
}

Error Simulator::create(uint64_t* handle, uint64_t bytes, const MemAllocationProp& prop) {
  if (const Error error = check_prop(prop); error != 0) return error;
  if (const Error error = check_size("cuMemCreate", 0, bytes); error != 0) return error;
  Device& device = devices_[static_cast<size_t>(prop.location.id)];
  if (bytes > settings_.device_bytes - device.used_bytes) {
    return refuse(kOutOfMemory, "cuMemCreate: the device is full");
  }
  device.used_bytes += bytes;
  *handle = next_handle_++;
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
    allocations_.erase(found);
    return;
  }
  Device& device = devices_[static_cast<size_t>(allocation.device)];
  (void)fallocate(device.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  static_cast<off_t>(allocation.offset), static_cast<off_t>(allocation.bytes));
  device.used_bytes -= allocation.bytes;
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
  if (!is_reserved(address, bytes)) return refuse(kInvalidValue, "cuMemMap: not reserved");
  if (overlaps_mapping(address, bytes)) {
    return refuse(kInvalidValue, "cuMemMap: something is mapped there");
  }
  if (allocation.mappings > 0 && is_touched(handle)) {
    return violate("cuMemMap: a kernel may still touch the handle's memory elsewhere");
  }
  if (mmap(pointer(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file_of(allocation),
           static_cast<off_t>(allocation.offset)) == MAP_FAILED) {
    return refuse(kOutOfMemory, "cuMemMap: the OS refused");
  }
  // A forked child has none of its parent's GPU memory.
  (void)madvise(pointer(address), bytes, MADV_DONTFORK);
  mappings_.emplace(address, Mapping{bytes, handle});
  ++allocation.mappings;
  return kSuccess;
}

Error Simulator::unmap(uint64_t address, uint64_t bytes) {
  const auto whole = whole_mappings(address, bytes);
  if (whole.empty()) return refuse(kInvalidValue, "cuMemUnmap: not a range of whole mappings");
  if (streams_.is_touched(address, bytes)) {
    return violate("cuMemUnmap: a kernel may still touch the range; its event has not passed");
  }
  if (!make_hole(address, bytes)) return refuse(kOutOfMemory, "cuMemUnmap: the OS refused");
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
  if (mprotect(pointer(address), bytes, read ? PROT_READ : PROT_READ | PROT_WRITE) != 0) {
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

Error Simulator::check_accessible(uint64_t address, uint64_t bytes, int access) {
  for (uint64_t at = address; at < address + bytes;) {
    unsigned long long flags = 0;
    if (get_access(at, &flags) != kSuccess || flags < static_cast<unsigned>(access)) {
      return refuse(kInvalidValue, "copy: part of the range is not accessible");
    }
    const auto& [start, mapping] = *std::prev(mappings_.upper_bound(at));
    at = start + mapping.bytes;
  }
  return kSuccess;
}

Error Simulator::check_fillable(uint64_t address, uint64_t bytes) {
  const Error error = check_accessible(address, bytes, kAccessReadWrite);
  if (error != 0) return error;
  if (!streams_.is_touched(address, bytes)) return kSuccess;
  return violate("cuMemsetD8: a kernel may still touch the range");
}

Error Simulator::check_target(int device, uint64_t address, uint64_t bytes) {
  if (copies_.is_plain(device, address, bytes)) return kSuccess;
  if (const Error error = check_accessible(address, bytes); error != 0) return error;
  for (uint64_t at = address; at < address + bytes;) {
    const auto& [start, mapping] = *std::prev(mappings_.upper_bound(at));
    if (allocations_.at(mapping.handle).device != device) {
      return refuse(kInvalidValue, "copy: part of the range is another device's");
    }
    at = start + mapping.bytes;
  }
  return kSuccess;
}

Error Simulator::allocate_plain(uint64_t* address, int device, uint64_t bytes) {
  uint64_t& used = devices_[static_cast<size_t>(device)].used_bytes;
  if (bytes == 0 || bytes > settings_.device_bytes - used) {
    return refuse(bytes == 0 ? kInvalidValue : kOutOfMemory, "cuMemAlloc: the device is full");
  }
  *address = copies_.allocate_plain(device, bytes);
  if (*address == 0) return refuse(kOutOfMemory, "cuMemAlloc: the OS refused");
  used += bytes;
  return kSuccess;
}

Error Simulator::free_plain(uint64_t address, int device) {
  const auto [owner, bytes] = copies_.plain(address);
  if (owner != device) return refuse(kInvalidValue, "cuMemFree: not allocated in this context");
  if (streams_.is_touched(address, bytes)) {
    return violate("cuMemFree: a copy may still touch the memory");
  }
  copies_.free_plain(address);
  devices_[static_cast<size_t>(device)].used_bytes -= bytes;
  return kSuccess;
}

}  // namespace test_libcuda
