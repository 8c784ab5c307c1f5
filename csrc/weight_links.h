// The lanes onto one device, kept from load to load, so that memory is pinned once. Over the links
// of other GPUs too, where given; their staging buffers are leased there.
// Thread rule: any thread; one load at a time.
#pragma once

#include <atomic>

#include "client.h"
#include "weight_lane.h"

namespace kvcached {

struct LinkOptions {
  size_t threads = 4;                  // lanes, dealt out over the links
  uint64_t staging_bytes = 32u << 20;  // of each link of a GPU
};

class WeightLinks {
 public:
  // For arenas of `target`. `others` are clients on GPUs whose links help; none for a host device.
  // Code::invalid_argument for a host device among several, or the same GPU twice;
  // Code::unavailable for GPUs without a link between them; Code::no_room if staging finds none.
  static Result<std::shared_ptr<WeightLinks>> open(const std::shared_ptr<Client>& target,
                                                   std::vector<std::shared_ptr<Client>> others,
                                                   const LinkOptions& options);
  // REQUIRES: no load uses them
  ~WeightLinks();
  WeightLinks(const WeightLinks&) = delete;
  WeightLinks& operator=(const WeightLinks&) = delete;

  // Whether arenas of this client can be filled over them.
  bool lead_to(const Client& client) const;
  const std::vector<std::unique_ptr<WeightLane>>& lanes() const { return lanes_; }
  // The largest chunk that a lane takes.
  uint64_t chunk_bytes_max() const { return chunk_bytes_max_; }

  // False while another load uses them.
  bool acquire() { return !busy_.exchange(true); }
  void release() { busy_ = false; }

 private:
  WeightLinks() = default;
  Status open_cuda(const std::vector<std::shared_ptr<Client>>& clients, const LinkOptions& options);
  Status lease(const std::shared_ptr<Client>& client, uint64_t bytes);

  struct Lease {
    std::shared_ptr<Client> client;
    uint64_t bytes;
  };

  Location target_;
  uint64_t chunk_bytes_max_ = UINT64_MAX;
  std::vector<Lease> leases_;
  std::vector<std::unique_ptr<WeightLane>> lanes_;
  std::atomic<bool> busy_ = false;
};

}  // namespace kvcached
