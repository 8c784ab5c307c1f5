// Memory of copies in addition to mapped pages: pinned host memory and plain device memory. Also
// which device may read which other. Called with the library's lock held.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>

#include "abi.h"

namespace test_libcuda {

class Copies {
 public:
  // Returns memory that the process can touch, or null.
  void* allocate_pinned(uint64_t bytes);
  // Returns the range's size; 0 if nothing of that address was allocated.
  uint64_t pinned_bytes(const void* address) const;
  void free_pinned(void* address);
  bool is_pinned(const void* address, uint64_t bytes) const;

  // Plain memory of a device; its addresses are the simulator's.
  void add_plain(uint64_t address, int device, uint64_t bytes) {
    plain_.emplace(address, Plain{device, bytes});
  }
  // Returns {device, bytes}; {-1, 0} if nothing of that address was allocated.
  std::pair<int, uint64_t> plain(uint64_t address) const;
  void remove_plain(uint64_t address) { plain_.erase(address); }
  // Returns the device of which the range is plain memory, or -1.
  int owner_of(uint64_t address, uint64_t bytes) const;

  // Returns false if it was enabled before.
  bool enable_peer(int device, int peer) { return peers_.emplace(device, peer).second; }
  bool can_reach(int device, int peer) const {
    return device == peer || peers_.count({device, peer}) != 0;
  }
  void forget_device(int device);

  // Bytes that went over the host's link of a device, or from another device to it.
  void count_from_host(int device, uint64_t bytes) { from_host_[device] += bytes; }
  void count_from_peer(int device, uint64_t bytes) { from_peer_[device] += bytes; }
  uint64_t from_host(int device) const;
  uint64_t from_peer(int device) const;

  size_t pinned_ranges() const { return pinned_.size(); }
  size_t plain_ranges() const { return plain_.size(); }

 private:
  struct Plain {
    int device;
    uint64_t bytes;
  };

  std::map<uint64_t, uint64_t> pinned_;  // address -> bytes
  std::map<uint64_t, Plain> plain_;
  std::set<std::pair<int, int>> peers_;
  std::map<int, uint64_t> from_host_;
  std::map<int, uint64_t> from_peer_;
};

}  // namespace test_libcuda
