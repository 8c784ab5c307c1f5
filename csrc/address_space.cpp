#include "address_space.h"

#include <algorithm>

namespace kvcached {

Result<std::shared_ptr<AddressSpace>> AddressSpace::reserve(std::shared_ptr<Vmm> vmm,
                                                            uint64_t bytes) {
  KV_ASSIGN(uint64_t address, vmm->reserve(bytes));
  return std::shared_ptr<AddressSpace>(new AddressSpace(std::move(vmm), address, bytes));
}

AddressSpace::AddressSpace(std::shared_ptr<Vmm> vmm, uint64_t address, uint64_t bytes)
    : vmm_(std::move(vmm)), address_(address), bytes_(bytes) {
  free_.emplace(address, bytes);
}

AddressSpace::~AddressSpace() {
  // Should something be mapped still, the reservation stays until the Vmm goes.
  (void)vmm_->free_address(address_, bytes_);
}

uint64_t AddressSpace::take(uint64_t bytes) {
  if (is_dead()) return 0;
  const std::lock_guard lock(mutex_);
  auto best = free_.end();
  for (auto at = free_.begin(); at != free_.end(); ++at) {
    if (at->second < bytes) continue;
    if (best == free_.end() || at->second < best->second) best = at;
  }
  if (best == free_.end()) return 0;
  const auto [address, size] = *best;
  free_.erase(best);
  if (size > bytes) free_.emplace(address + bytes, size - bytes);
  return address;
}

void AddressSpace::give(uint64_t address, uint64_t bytes) {
  if (is_dead()) return;
  const std::lock_guard lock(mutex_);
  auto after = free_.lower_bound(address);
  if (after != free_.end() && after->first == address + bytes) {
    bytes += after->second;
    after = free_.erase(after);
  }
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == address) {
      before->second += bytes;
      return;
    }
  }
  free_.emplace(address, bytes);
}

uint64_t AddressSpace::free_bytes() const {
  if (is_dead()) return 0;
  const std::lock_guard lock(mutex_);
  uint64_t sum = 0;
  for (const auto& [address, bytes] : free_) sum += bytes;
  return sum;
}

uint64_t AddressSpace::largest_free_bytes() const {
  if (is_dead()) return 0;
  const std::lock_guard lock(mutex_);
  uint64_t largest = 0;
  for (const auto& [address, bytes] : free_) largest = std::max(largest, bytes);
  return largest;
}

}  // namespace kvcached
