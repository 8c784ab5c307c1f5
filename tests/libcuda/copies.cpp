#include "copies.h"

#include <sys/mman.h>

#include <iterator>

namespace test_libcuda {

namespace {

void* map_memory(uint64_t bytes) {
  void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return nullptr;
  // A forked child has none of it.
  (void)madvise(made, bytes, MADV_DONTFORK);
  return made;
}

uint64_t value(const std::map<int, uint64_t>& counts, int device) {
  const auto found = counts.find(device);
  return found == counts.end() ? 0 : found->second;
}

}  // namespace

void* Copies::allocate_pinned(uint64_t bytes) {
  void* made = map_memory(bytes);
  if (made != nullptr) pinned_.emplace(number(made), bytes);
  return made;
}

uint64_t Copies::pinned_bytes(const void* address) const {
  const auto found = pinned_.find(number(address));
  return found == pinned_.end() ? 0 : found->second;
}

void Copies::free_pinned(void* address) {
  munmap(address, pinned_bytes(address));
  pinned_.erase(number(address));
}

bool Copies::is_pinned(const void* address, uint64_t bytes) const {
  const auto after = pinned_.upper_bound(number(address));
  if (after == pinned_.begin()) return false;
  const auto& [start, size] = *std::prev(after);
  return number(address) - start < size && bytes <= size - (number(address) - start);
}

std::pair<int, uint64_t> Copies::plain(uint64_t address) const {
  const auto found = plain_.find(address);
  if (found == plain_.end()) return {-1, 0};
  return {found->second.device, found->second.bytes};
}

int Copies::owner_of(uint64_t address, uint64_t bytes) const {
  const auto after = plain_.upper_bound(address);
  if (after == plain_.begin()) return -1;
  const auto& [start, range] = *std::prev(after);
  const uint64_t offset = address - start;
  return offset < range.bytes && bytes <= range.bytes - offset ? range.device : -1;
}

void Copies::forget_device(int device) {
  std::erase_if(
      peers_, [device](const auto& pair) { return pair.first == device || pair.second == device; });
}

uint64_t Copies::from_host(int device) const { return value(from_host_, device); }

uint64_t Copies::from_peer(int device) const { return value(from_peer_, device); }

}  // namespace test_libcuda
