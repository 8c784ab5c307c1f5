#include "weight_links.h"

#include <algorithm>
#include <set>

#include "cuda_lane.h"

namespace kvcached {

namespace {

constexpr size_t kBuffersPerLane = 2;  // one is filled while the GPU fetches the other
constexpr uint64_t kSmallestBuffer = 4096;

Status check_links(const std::vector<std::shared_ptr<Client>>& clients) {
  std::set<int> ordinals;
  for (const auto& client : clients) {
    KV_TRY(client->check_open());
    const Location place = client->vmm()->location();
    if (!place.on_gpu && clients.size() > 1) {
      return failure(Code::invalid_argument, "a host device has no link that could help");
    }
    if (!ordinals.insert(place.ordinal).second) {
      return failure(Code::invalid_argument,
                     "cuda:" + std::to_string(place.ordinal) + " is named twice");
    }
  }
  return {};
}

}  // namespace

Result<std::shared_ptr<WeightLinks>> WeightLinks::open(const std::shared_ptr<Client>& target,
                                                       std::vector<std::shared_ptr<Client>> others,
                                                       const LinkOptions& options) {
  if (options.threads == 0) return failure(Code::invalid_argument, "0 threads load nothing");
  others.insert(others.begin(), target);
  if (Status status = check_links(others); !status.ok()) return status;
  std::shared_ptr<WeightLinks> links(new WeightLinks);
  links->target_ = target->vmm()->location();
  if (!links->target_.on_gpu) {
    links->lanes_ = host_lanes(options.threads);
    return links;
  }
  if (Status status = links->open_cuda(others, options); !status.ok()) return status;
  return links;
}

Status WeightLinks::open_cuda(const std::vector<std::shared_ptr<Client>>& clients,
                              const LinkOptions& options) {
  const size_t lanes = (options.threads + clients.size() - 1) / clients.size();
  const uint64_t buffer_bytes =
      std::max(kSmallestBuffer, options.staging_bytes / lanes / kBuffersPerLane);
  chunk_bytes_max_ = buffer_bytes;
  std::shared_ptr<CudaDevice> target;
  for (const auto& client : clients) {
    Result<std::unique_ptr<CudaDevice>> opened =
        CudaDevice::open(client->vmm()->location().ordinal);
    if (!opened.ok()) return opened.status();
    std::shared_ptr<CudaDevice> link = std::move(opened.value());
    if (target == nullptr) {
      target = link;
    } else {
      KV_TRY(lease(client, lanes * kBuffersPerLane * buffer_bytes));
    }
    for (size_t i = 0; i < lanes; ++i) {
      auto lane = CudaLane::make(target, link, kBuffersPerLane, buffer_bytes);
      if (!lane.ok()) return lane.status();
      lanes_.push_back(std::move(lane.value()));
    }
  }
  return {};
}

Status WeightLinks::lease(const std::shared_ptr<Client>& client, uint64_t bytes) {
  KV_TRY(client->reserve_static(bytes));
  leases_.push_back({client, bytes});
  return {};
}

WeightLinks::~WeightLinks() {
  lanes_.clear();  // memory first, ledger second
  for (const Lease& lease : leases_) {
    // A client that was closed has given everything back.
    if (lease.client->check_open().ok()) (void)lease.client->release_static(lease.bytes);
  }
}

bool WeightLinks::lead_to(const Client& client) const {
  const Location place = client.vmm()->location();
  return place.on_gpu == target_.on_gpu && place.ordinal == target_.ordinal;
}

}  // namespace kvcached
