// Access to ranges, and memory without mappings (cuMemAlloc).
#include <cstring>
#include <utility>

#include "garbage.h"
#include "served.h"
#include "simulator.h"

namespace test_libcuda {

namespace {

constexpr uint64_t kPlainAlignment = 4096;  // the OS's page

}  // namespace

Error Simulator::check_accessible(uint64_t address, uint64_t bytes, int access) {
  if (copies_.owner_of(address, bytes) >= 0) return kSuccess;
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

Error Simulator::fill(uint64_t address, unsigned char value, uint64_t bytes, uint64_t stream) {
  const Error error = check_accessible(address, bytes, kAccessReadWrite);
  if (error != 0) return error;
  const int device = current_device();
  if (streams_.is_touched_elsewhere(address, bytes, stream, device)) {
    return violate("cuMemsetD8: a kernel of another stream may still touch the range");
  }
  Work work{address, bytes};
  work.run = [=, to = view(address)] { std::memset(to, value, bytes); };
  return enqueue(stream, device, std::move(work));
}

Error Simulator::check_target(int device, uint64_t address, uint64_t bytes, int access) {
  if (copies_.owner_of(address, bytes) == device) return kSuccess;
  if (const Error error = check_accessible(address, bytes, access); error != 0) return error;
  for (uint64_t at = address; at < address + bytes;) {
    const auto& [start, mapping] = *std::prev(mappings_.upper_bound(at));
    if (allocations_.at(mapping.handle).device != device) {
      return refuse(kInvalidValue, "copy: part of the range is another device's");
    }
    at = start + mapping.bytes;
  }
  return kSuccess;
}

// The driver takes memory in whole units.
uint64_t Simulator::charged_bytes(uint64_t bytes) const {
  const uint64_t unit = settings_.granularity_bytes;
  return (bytes + unit - 1) / unit * unit;
}

Error Simulator::allocate_plain(uint64_t* address, int device, uint64_t bytes) {
  if (const Error error = check_safe("cuMemAlloc"); error != 0) return error;
  if (bytes == 0) return refuse(kInvalidValue, "cuMemAlloc: no bytes");
  if (!take(device, charged_bytes(bytes))) {
    return refuse(kOutOfMemory, "cuMemAlloc: the device is full");
  }
  const uint64_t whole = (bytes + kPlainAlignment - 1) / kPlainAlignment * kPlainAlignment;
  const uint64_t found = addresses_.reserve(whole, kPlainAlignment);
  if (found == 0 || !addresses_.show(found, whole, -1, 0)) {
    give(device, charged_bytes(bytes));
    return refuse(kOutOfMemory, "cuMemAlloc: the OS refused");
  }
  if (settings_.garbage) fill_with_garbage(addresses_.view(found), whole, next_handle_++);
  copies_.add_plain(found, device, bytes);
  *address = found;
  return kSuccess;
}

Error Simulator::free_plain(uint64_t address, int device) {
  if (const Error error = check_safe("cuMemFree"); error != 0) return error;
  const auto [owner, bytes] = copies_.plain(address);
  if (owner != device) return refuse(kInvalidValue, "cuMemFree: not allocated in this context");
  if (streams_.is_touched(address, bytes)) {
    return violate("cuMemFree: a copy may still touch the memory");
  }
  (void)addresses_.hide(address, addresses_.reserved_bytes(address));
  addresses_.free(address);
  copies_.remove_plain(address);
  give(device, charged_bytes(bytes));
  return kSuccess;
}

bool Simulator::is_plain(uint64_t address) const { return copies_.owner_of(address, 1) >= 0; }

void* Simulator::kernel_view(uint64_t address, uint64_t bytes, bool write) {
  if (bytes == 0 || copies_.owner_of(address, bytes) >= 0) return addresses_.view(address);
  for (uint64_t at = address; at < address + bytes;) {
    unsigned long long flags = 0;
    if (get_access(at, &flags) != kSuccess) return forbid("kernel: part of the range is a hole");
    if (flags == 0) return forbid("kernel: part of the range has no access yet");
    if (write && flags == kAccessRead) return forbid("kernel: part of the range is read-only");
    const auto& [start, mapping] = *std::prev(mappings_.upper_bound(at));
    at = start + mapping.bytes;
  }
  return addresses_.view(address);
}

void* Simulator::forbid(std::string why) {
  (void)refuse(kInvalidValue, std::move(why));
  return nullptr;
}

}  // namespace test_libcuda
