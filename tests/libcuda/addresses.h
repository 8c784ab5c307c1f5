// The virtual addresses of devices, and where kernels access the memory mapped there.
//
// One range of host addresses, never accessible to the CPU, stands for all devices' addresses. A
// second one at a constant distance shows the same memory to the library's copies and to tests'
// kernels, wherever it is mapped with access. Called with the library's lock held.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace test_libcuda {

class DeviceAddresses {
 public:
  // Reserves fewer bytes if the OS has no more addresses (those of sanitizers are limited). Returns
  // false if it has none.
  bool open(uint64_t bytes);
  // view(address) - address; 0 before open().
  uint64_t distance() const { return distance_; }
  void* view(uint64_t address) const { return reinterpret_cast<void*>(address + distance_); }

  // Returns 0 if there is not enough room. An address is reused only after all others were used.
  uint64_t reserve(uint64_t bytes, uint64_t alignment);
  void free(uint64_t address);
  bool is_reserved(uint64_t address, uint64_t bytes) const;
  // Returns the bytes of the reservation that starts there; 0 if none does.
  uint64_t reserved_bytes(uint64_t address) const;
  size_t reservations() const { return reserved_.size(); }

  // These return false if the OS refuses. show() maps a file without access, or for fd -1 anonymous
  // memory, which the CPU may use.
  bool show(uint64_t address, uint64_t bytes, int fd, uint64_t offset);
  bool protect(uint64_t address, uint64_t bytes, bool writable);
  bool hide(uint64_t address, uint64_t bytes);

 private:
  uint64_t find_room(uint64_t from, uint64_t bytes, uint64_t alignment) const;

  uint64_t start_ = 0;
  uint64_t bytes_ = 0;
  uint64_t next_ = 0;
  uint64_t distance_ = 0;
  std::map<uint64_t, uint64_t> reserved_;  // address -> bytes
};

}  // namespace test_libcuda
