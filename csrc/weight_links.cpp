#include "weight_links.h"

#include <algorithm>

#include "cuda_lane.h"

namespace kvcached {

namespace {

constexpr size_t kBuffersPerLane = 2;  // one is filled while the GPU fetches the other
constexpr uint64_t kSmallestBuffer = 4096;

// Leases pages as if they were mapped. Only those that no other client waits for or is guaranteed.
Status lease(Client* client, uint64_t bytes) {
  KV_TRY(client->reserve(bytes));
  Status status = client->commit(bytes);
  if (!status.ok()) (void)client->cancel(bytes);
  return status;
}

}  // namespace

Result<std::shared_ptr<WeightLinks>> WeightLinks::open(const std::shared_ptr<Client>& target,
                                                       const LinkOptions& options) {
  if (options.threads == 0) return failure(Code::invalid_argument, "threads must be > 0");
  if (options.threads > kMaxThreads) {
    return failure(Code::invalid_argument, "threads is ", options.threads,
                   ", but must be <= ", kMaxThreads);
  }
  KV_TRY(target->check_open());
  std::shared_ptr<WeightLinks> links(new WeightLinks(target->vmm()->location(), options));
  KV_TRY(links->open_own());
  return links;
}

Status WeightLinks::open_own() {
  if (!place_.on_gpu) {
    for (auto& lane : host_lanes(options_.threads))
      lanes_.push_back({place_.ordinal, std::move(lane)});
    return {};
  }
  KV_ASSIGN(target_, CudaDevice::open(place_.ordinal));
  chunk_bytes_max_ =
      std::max(kSmallestBuffer, options_.staging_bytes / options_.threads / kBuffersPerLane);
  return make_lanes(target_);
}

Status WeightLinks::make_lanes(const std::shared_ptr<CudaDevice>& link) {
  for (size_t i = 0; i < options_.threads; ++i) {
    KV_ASSIGN(auto lane, CudaLane::make(target_, link, kBuffersPerLane, chunk_bytes_max_));
    lanes_.push_back({link->ordinal(), std::move(lane)});
  }
  return {};
}

Status WeightLinks::add(const std::shared_ptr<Client>& other, uint64_t share_bytes) {
  if (!acquire()) return failure(Code::busy, "a load uses these links; wait for it");
  Status status = check_helper(*other);
  if (status.ok()) status = begin(other, share_bytes);
  if (status.ok()) {
    status = open_helper(*other);
    if (!status.ok()) end(other->vmm()->location().ordinal);
  }
  release();
  return status;
}

Status WeightLinks::check_helper(const Client& other) const {
  const Location place = other.vmm()->location();
  if (!place_.on_gpu || !place.on_gpu) {
    return failure(Code::invalid_argument, "a host device does not have a link that could help");
  }
  for (const Lane& lane : lanes_) {
    if (lane.ordinal != place.ordinal) continue;
    return failure(Code::invalid_argument, "cuda:", place.ordinal, " is named twice");
  }
  return {};
}

Status WeightLinks::begin(const std::shared_ptr<Client>& other, uint64_t share_bytes) {
  KV_TRY(other->begin_link());
  const uint64_t page = other->page_bytes();
  const uint64_t staging = options_.threads * kBuffersPerLane * chunk_bytes_max_;
  const uint64_t bytes = (staging + share_bytes + page - 1) / page * page;
  Status status = lease(other.get(), bytes);
  if (status.ok()) {
    helpers_.push_back({other, bytes});
  } else {
    other->end_link();
  }
  return status;
}

Status WeightLinks::open_helper(const Client& other) {
  KV_ASSIGN(std::unique_ptr<CudaDevice> opened, CudaDevice::open(other.vmm()->location().ordinal));
  return make_lanes(std::shared_ptr<CudaDevice>(std::move(opened)));
}

Status WeightLinks::drop(const Client& other) {
  if (!acquire()) return failure(Code::busy, "a load uses these links; wait for it");
  end(other.vmm()->location().ordinal);
  release();
  return {};
}

void WeightLinks::end(int ordinal) {
  const auto is_of = [ordinal](const Helper& helper) {
    return helper.client->vmm()->location().ordinal == ordinal;
  };
  const auto helper = std::find_if(helpers_.begin(), helpers_.end(), is_of);
  if (helper == helpers_.end()) return;
  std::erase_if(lanes_, [ordinal](const Lane& lane) { return lane.ordinal == ordinal; });
  (void)helper->client->release(helper->leased_bytes);
  helper->client->end_link();
  helpers_.erase(helper);
}

void WeightLinks::end_all() {
  while (!helpers_.empty()) end(helpers_.back().client->vmm()->location().ordinal);
  lanes_.clear();
}

// The links stay acquired, because no load can begin without lanes.
void WeightLinks::close() {
  if (acquire()) end_all();
}

WeightLinks::~WeightLinks() { end_all(); }

std::string WeightLinks::link_of(size_t index) const {
  return place_.on_gpu ? "cuda:" + std::to_string(lanes_[index].ordinal) : "host";
}

bool WeightLinks::lead_to(const Client& client) const {
  const Location place = client.vmm()->location();
  return place.on_gpu == place_.on_gpu && place.ordinal == place_.ordinal;
}

}  // namespace kvcached
