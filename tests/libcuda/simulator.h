// GPUs of host memory that refuse every call that CUDA's documentation forbids. One sparse memfd
// per device holds its physical memory. The CPU never sees it at the devices' addresses; copies and
// kernels use the views of addresses.h, where touching a hole, or a page without access, is a
// fault.
//
// refusal() describes the rule that the last refused call broke. Everything here is called with one
// lock held (driver_api.cpp), for the process that called init. In a forked child the library does
// not work, as CUDA does not, and none of the mapped memory is there.
#pragma once

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "abi.h"
#include "addresses.h"
#include "book.h"
#include "capture.h"
#include "copies.h"
#include "settings.h"
#include "streams.h"

namespace test_libcuda {

struct Allocation {
  int device;
  uint64_t bytes;
  uint64_t offset;  // in the device's memfd
  int mappings = 0;
  bool released = false;
  bool exportable = false;
  int imported_fd = -1;      // of another process's device file, or of the same process's
  uint64_t shared_name = 0;  // in the book; 0: no other process can have it
};

struct Mapping {
  uint64_t bytes;
  uint64_t handle;
  int access = 0;
  int reader = -1;  // the device that has it
};

struct Device {
  int gpu = 0;  // of the machine
  int fd = -1;
  uint64_t used_bytes = 0;  // by this process's allocations
  uint64_t next_offset = 0;
  int context_uses = 0;
};

// A captured graph, or an instance of one that can be launched.
struct GraphMemory {
  Graph graph;
  int device = -1;  // -1: not instantiated
  uint64_t bytes = 0;
};

class Simulator {
 public:
  static Simulator& instance();

  Error init();
  // Returns an error unless calls can be served: initialised, and not in a forked child.
  Error check_usable() const;
  const Settings& settings() const { return settings_; }
  const std::string& refusal() const { return refusal_; }
  // Bytes of this process's allocations, and of all processes with the driver's memory for them.
  uint64_t used_bytes(int device) const;
  uint64_t device_used_bytes(int device);
  int gpu_of(int device) const { return devices_[static_cast<size_t>(device)].gpu; }
  // Describes what is not released; empty if everything is.
  std::string leaks() const;

  Streams& streams() { return streams_; }
  Copies& copies() { return copies_; }
  Captures& captures() { return captures_; }
  std::map<uint64_t, GraphMemory>& graphs() { return graphs_; }
  uint64_t next_handle() { return next_handle_++; }
  // Counts calls that took memory from a kernel, or copied as no user of this library intends.
  uint64_t violations() const { return violations_; }
  Error violate(std::string why);

  // Gives work to a stream, or records it if that captures.
  Error enqueue(uint64_t stream, int device, Work work);
  // Returns an error unless the call may be made now. During captures it is refused, and they
  // become invalid.
  Error check_safe(const char* call);
  // Does the same for calls that use the default stream and wait for it.
  Error check_synchronous(const char* call);
  Error launch_graph(uint64_t graph, uint64_t stream, int device);

  // Memory that the driver takes for itself.
  bool take_driver_memory(int device, uint64_t bytes);
  void give_driver_memory(int device, uint64_t bytes);
  Error retain_context(int device);
  Error release_context(int device);
  bool has_context(int device) const;

  Error check_prop(const MemAllocationProp& prop);
  Error reserve(uint64_t* address, uint64_t bytes, uint64_t alignment);
  Error free_address(uint64_t address, uint64_t bytes);
  Error create(uint64_t* handle, uint64_t bytes, const MemAllocationProp& prop);
  Error release(uint64_t handle);
  // A file stands for the allocation's memory. Its position is the memory's offset in the device's
  // file, and a label after all memory describes it. As on CUDA an import keeps the memory's bytes
  // taken on the device. Stricter than CUDA, the content is gone with its owner's last use, so that
  // late reads return zeros.
  Error export_file(int* fd, uint64_t handle);
  Error import_file(uint64_t* handle, int fd);
  Error map(uint64_t address, uint64_t bytes, uint64_t offset, uint64_t handle);
  Error unmap(uint64_t address, uint64_t bytes);
  Error set_access(uint64_t address, uint64_t bytes, const MemAccessDesc& access);
  // Sets 0, kAccessRead or kAccessReadWrite; refuses addresses where nothing is mapped.
  Error get_access(uint64_t address, unsigned long long* flags);
  // Returns an error unless a copy may touch the range, with at least this access.
  Error check_accessible(uint64_t address, uint64_t bytes, int access = kAccessRead);
  // Returns an error unless a copy on the device may read the range, by the device's own mapping.
  Error check_source(int device, uint64_t address, uint64_t bytes);
  // Enqueues work of the stream that writes the range.
  Error fill(uint64_t address, unsigned char value, uint64_t bytes, uint64_t stream);
  // Returns an error unless the range is the device's memory, plain or mapped with this access.
  Error check_target(int device, uint64_t address, uint64_t bytes, int access = kAccessReadWrite);

  // Returns where a kernel on the address's device touches the range; null if it may not.
  void* kernel_view(uint64_t address, uint64_t bytes, bool write);
  // Returns the same for a copy that was checked.
  void* view(uint64_t address) const { return addresses_.view(address); }
  uint64_t kernel_distance() const { return addresses_.distance(); }

  Error allocate_plain(uint64_t* address, int device, uint64_t bytes);
  Error free_plain(uint64_t address, int device);

 private:
  using Mappings = std::map<uint64_t, Mapping>;

  Error refuse(Error error, std::string why);
  // Returns whether pending work may touch the handle's memory, wherever that is mapped.
  bool is_touched(uint64_t handle) const;
  Error check_size(const char* call, uint64_t address, uint64_t bytes);
  bool is_plain(uint64_t address) const;
  // Returns -1 if the process does not see the GPU.
  int device_of_gpu(int gpu) const;
  uint64_t charged_bytes(uint64_t bytes) const;
  Error check_mappable(const char* call);
  // Takes the driver's memory for mappings at the address, which it keeps as long as the context.
  // Returns false if the device lacks that memory.
  bool take_table(int device, uint64_t address);
  bool take(int device, uint64_t bytes);
  void give(int device, uint64_t bytes);
  void* forbid(std::string why);
  bool overlaps_mapping(uint64_t address, uint64_t bytes) const;
  int file_of(const Allocation& allocation) const;
  // Returns the mappings that form exactly the range; none if it cuts one or has a hole.
  std::vector<Mappings::iterator> whole_mappings(uint64_t address, uint64_t bytes);
  void free_if_unused(uint64_t handle);
  static void abandon_in_child();

  Settings settings_;
  std::vector<Device> devices_;
  DeviceAddresses addresses_;
  Mappings mappings_;                          // by address
  std::set<std::pair<int, uint64_t>> tables_;  // device, and which addresses
  std::map<uint64_t, Allocation> allocations_;
  Streams streams_;
  Copies copies_;
  Captures captures_;
  std::map<uint64_t, GraphMemory> graphs_;
  Book book_;
  uint64_t violations_ = 0;
  uint64_t next_handle_ = 0x1000;
  std::string refusal_;
  bool initialised_ = false;
  bool dead_ = false;
};

}  // namespace test_libcuda
