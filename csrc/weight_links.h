// The lanes to one device, kept between loads so that memory is pinned once. Optionally also over
// the links of other GPUs, where their memory is leased like pages, so that it can be given back.
// Thread rule: any thread. One load at a time, and no load while links are added or removed.
#pragma once

#include <atomic>

#include "client.h"
#include "non_copyable.h"
#include "weight_lane.h"

namespace kvcached {

struct LinkOptions {
  size_t threads = 4;                  // lanes of each link
  uint64_t staging_bytes = 32u << 20;  // of each link of a GPU
};

class CudaDevice;

class WeightLinks : private NonCopyable {
 public:
  static constexpr size_t kMaxThreads = 1023;
  // Creates the lanes for arenas of `target` over its own link. Code::invalid_argument for 0
  // threads or too many.
  static Result<std::shared_ptr<WeightLinks>> open(const std::shared_ptr<Client>& target,
                                                   const LinkOptions& options);
  // REQUIRES: no load uses them
  ~WeightLinks();

  // Adds the link of another GPU, and keeps `other` from closing. Leases the staging memory there,
  // and `share_bytes` for this process's context on that GPU. Code::invalid_argument for a host
  // device or a GPU whose link is used already, Code::unavailable for a GPU without a link to the
  // target, Code::no_room, Code::busy.
  Status add(const std::shared_ptr<Client>& other, uint64_t share_bytes);
  // Removes the link and gives its memory back. Does nothing for a GPU that was not added.
  // Code::busy while a load runs.
  Status drop(const Client& other);
  // Gives everything back, now or when the load that uses the links ends.
  void close();

  // True if arenas of this client can be filled over these links.
  bool lead_to(const Client& client) const;

  // --- for the load that acquired them ---
  size_t lanes() const { return lanes_.size(); }
  WeightLane* lane(size_t index) const { return lanes_[index].lane.get(); }
  // Device whose link to the host the lane uses: "cuda:1", or "host" on a host device.
  std::string link_of(size_t index) const;
  // True if that is not the target.
  bool is_relayed(size_t index) const { return lanes_[index].ordinal != place_.ordinal; }
  // Largest chunk that a lane takes.
  uint64_t chunk_bytes_max() const { return chunk_bytes_max_; }

  // Returns false while another load uses the links.
  bool acquire() { return !busy_.exchange(true); }
  void release() { busy_ = false; }

 private:
  struct Helper {
    std::shared_ptr<Client> client;
    uint64_t leased_bytes;
  };
  struct Lane {
    int ordinal;
    std::unique_ptr<WeightLane> lane;
  };

  WeightLinks(Location place, const LinkOptions& options) : place_(place), options_(options) {}
  Status open_own();
  Status check_helper(const Client& other) const;
  // Keeps `other` open and leases the memory on it.
  Status begin(const std::shared_ptr<Client>& other, uint64_t share_bytes);
  Status open_helper(const Client& other);
  Status make_lanes(const std::shared_ptr<CudaDevice>& link);
  // Memory first, ledger second.
  void end(int ordinal);
  void end_all();

  const Location place_;
  const LinkOptions options_;
  uint64_t chunk_bytes_max_ = UINT64_MAX;  // size of a buffer on a GPU
  std::shared_ptr<CudaDevice> target_;     // null on a host device
  std::vector<Helper> helpers_;
  std::vector<Lane> lanes_;
  std::atomic<bool> busy_ = false;
};

}  // namespace kvcached
