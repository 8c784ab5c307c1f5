// GPUs made of host memory that refuse whatever CUDA's documentation forbids. One sparse memfd per
// device holds its physical memory, so that touching a hole, or a page without access, is a fault.
//
// A refusal also says in words which rule was broken: refusal(). Everything here is called with
// one lock held (driver_api.cpp), on behalf of the process that called init; in a forked child
// the library is dead, as CUDA is, and none of the mapped memory is there.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "abi.h"
#include "copies.h"
#include "streams.h"

namespace test_libcuda {

struct Allocation {
  int device;
  uint64_t bytes;
  uint64_t offset;  // in the device's memfd
  int mappings = 0;
  bool released = false;
  bool exportable = false;
  int imported_fd = -1;  // of another process's device file, or of the same process's
};

struct Mapping {
  uint64_t bytes;
  uint64_t handle;
  int access = 0;
  int reader = -1;  // the device that has it
};

struct Device {
  int fd = -1;
  uint64_t used_bytes = 0;
  uint64_t next_offset = 0;
  int context_uses = 0;
};

struct Settings {
  int devices = 2;                     // KVCACHED_TEST_CUDA_DEVICES
  uint64_t device_bytes = 1ULL << 30;  // KVCACHED_TEST_CUDA_BYTES, of each
  uint64_t granularity_bytes = 4096;   // KVCACHED_TEST_CUDA_GRANULARITY; GPUs have 2 MiB
  bool read_only = true;  // KVCACHED_TEST_CUDA_READ_ONLY=0: read access alone is refused
  bool peers = true;      // KVCACHED_TEST_CUDA_PEERS=0: no device reads another
  bool exports = true;    // KVCACHED_TEST_CUDA_EXPORTS=0: no memory is shared between processes
};

class Simulator {
 public:
  static Simulator& instance();

  Error init();
  // Whether calls can be served: initialised, and not in a forked child.
  Error check_usable() const;
  const Settings& settings() const { return settings_; }
  const std::string& refusal() const { return refusal_; }
  uint64_t used_bytes(int device) const;
  // What is not given back, in words; empty if nothing.
  std::string leaks() const;

  Streams& streams() { return streams_; }
  Copies& copies() { return copies_; }
  // Calls that took memory away from a kernel, or copied as this library's users never mean to.
  uint64_t violations() const { return violations_; }
  Error violate(std::string why);

  Error retain_context(int device);
  Error release_context(int device);
  bool has_context(int device) const;

  Error check_prop(const MemAllocationProp& prop);
  Error reserve(uint64_t* address, uint64_t bytes, uint64_t alignment);
  Error free_address(uint64_t address, uint64_t bytes);
  Error create(uint64_t* handle, uint64_t bytes, const MemAllocationProp& prop);
  Error release(uint64_t handle);
  // A file stands for the allocation's memory: its position says where in the device's file that
  // is, and a label behind all memory what it is. Stricter than CUDA, where an import keeps the
  // memory: here it is gone with its owner's last use, so that whoever reads too late reads zeros.
  Error export_file(int* fd, uint64_t handle);
  Error import_file(uint64_t* handle, int fd);
  Error map(uint64_t address, uint64_t bytes, uint64_t offset, uint64_t handle);
  Error unmap(uint64_t address, uint64_t bytes);
  Error set_access(uint64_t address, uint64_t bytes, const MemAccessDesc& access);
  // 0, kAccessRead or kAccessReadWrite; refuses addresses where nothing is mapped.
  Error get_access(uint64_t address, unsigned long long* flags);
  // Whether a copy may touch the range, with at least this access.
  Error check_accessible(uint64_t address, uint64_t bytes, int access = kAccessRead);
  // Whether a copy on the device may read the range: through a mapping of the device's own.
  Error check_source(int device, uint64_t address, uint64_t bytes);
  // The same for the driver's own write, which is in no stream's order.
  Error check_fillable(uint64_t address, uint64_t bytes);
  // Whether the range is memory of that device, mapped with access or plain.
  Error check_target(int device, uint64_t address, uint64_t bytes);

  Error allocate_plain(uint64_t* address, int device, uint64_t bytes);
  Error free_plain(uint64_t address, int device);

 private:
  using Mappings = std::map<uint64_t, Mapping>;

  Error refuse(Error error, std::string why);
  // Whether pending work may touch the handle's memory, wherever that is mapped.
  bool is_touched(uint64_t handle) const;
  Error check_size(const char* call, uint64_t address, uint64_t bytes);
  bool is_reserved(uint64_t address, uint64_t bytes) const;
  bool overlaps_mapping(uint64_t address, uint64_t bytes) const;
  int file_of(const Allocation& allocation) const;
  // The mappings that make up the range exactly; empty if it cuts one or has a hole.
  std::vector<Mappings::iterator> whole_mappings(uint64_t address, uint64_t bytes);
  void free_if_unused(uint64_t handle);
  static void abandon_in_child();

  Settings settings_;
  std::vector<Device> devices_;
  std::map<uint64_t, uint64_t> reservations_;  // address -> bytes
  Mappings mappings_;                          // by address
  std::map<uint64_t, Allocation> allocations_;
  Streams streams_;
  Copies copies_;
  uint64_t violations_ = 0;
  uint64_t next_handle_ = 0x1000;
  std::string refusal_;
  bool initialised_ = false;
  bool dead_ = false;
};

}  // namespace test_libcuda
