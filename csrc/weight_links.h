// The lanes onto one device, kept from load to load, so that memory is pinned once. Over the links
// of other GPUs too, where given. What they take there is leased like pages: it can be given back.
// Thread rule: any thread; one load at a time, and no load while links come or go.
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
  // For arenas of `target`, over its own link. Code::invalid_argument for 0 threads or too many.
  static Result<std::shared_ptr<WeightLinks>> open(const std::shared_ptr<Client>& target,
                                                   const LinkOptions& options);
  // REQUIRES: no load uses them
  ~WeightLinks();

  // The link of another GPU helps from now on, and `other` cannot close. Leases its staging there,
  // and `share_bytes` for what else this process has on that GPU: a context.
  // Code::invalid_argument for a host device or a GPU whose link is in use already,
  // Code::unavailable for a GPU without a link to the target, Code::no_room, Code::busy.
  Status add(const std::shared_ptr<Client>& other, uint64_t share_bytes);
  // Gives all of that back. Code::busy while a load runs; nothing happens for a GPU that does not
  // help.
  Status drop(const Client& other);
  // Gives everything back, or once the load that uses them is gone.
  void close();

  // Whether arenas of this client can be filled over them.
  bool lead_to(const Client& client) const;

  // --- for the load that acquired them ---
  size_t lanes() const { return lanes_.size(); }
  WeightLane* lane(size_t index) const { return lanes_[index].lane.get(); }
  // Whose link to the host the lane uses: "cuda:1"; "host" on a host device.
  std::string link_of(size_t index) const;
  // Whether that is another GPU's than the target.
  bool is_relayed(size_t index) const { return lanes_[index].ordinal != place_.ordinal; }
  // The largest chunk that a lane takes.
  uint64_t chunk_bytes_max() const { return chunk_bytes_max_; }

  // False while another load uses them.
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
  // Keeps `other` open, and leases its part.
  Status begin(const std::shared_ptr<Client>& other, uint64_t share_bytes);
  Status open_helper(const Client& other);
  Status make_lanes(const std::shared_ptr<CudaDevice>& link);
  // Memory first, ledger second.
  void end(int ordinal);
  void end_all();

  const Location place_;
  const LinkOptions options_;
  uint64_t chunk_bytes_max_ = UINT64_MAX;  // and the size of a buffer, on a GPU
  std::shared_ptr<CudaDevice> target_;     // null on a host device
  std::vector<Helper> helpers_;
  std::vector<Lane> lanes_;
  std::atomic<bool> busy_ = false;
};

}  // namespace kvcached
