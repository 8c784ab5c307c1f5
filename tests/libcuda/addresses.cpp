#include "addresses.h"

#include <sys/mman.h>

#include <iterator>

namespace test_libcuda {

namespace {

constexpr int kNothing = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

constexpr uint64_t kLeastBytes = uint64_t{1} << 32;

// A forked child has none of its parent's GPU memory.
bool keep_from_children(void* at, uint64_t bytes) { return madvise(at, bytes, MADV_DONTFORK) == 0; }

}  // namespace

bool DeviceAddresses::open(uint64_t bytes) {
  void* made = mmap(nullptr, 2 * bytes, PROT_NONE, kNothing, -1, 0);
  for (; made == MAP_FAILED && bytes > kLeastBytes; bytes /= 2) {
    made = mmap(nullptr, bytes, PROT_NONE, kNothing, -1, 0);
  }
  if (made == MAP_FAILED) return false;
  start_ = reinterpret_cast<uint64_t>(made);
  bytes_ = bytes;
  next_ = start_;
  distance_ = bytes;
  return true;
}

uint64_t DeviceAddresses::find_room(uint64_t from, uint64_t bytes, uint64_t alignment) const {
  const auto aligned = [=](uint64_t at) { return (at + alignment - 1) / alignment * alignment; };
  uint64_t at = aligned(from);
  auto next = reserved_.lower_bound(at);
  if (next != reserved_.begin()) {
    const auto& [before, size] = *std::prev(next);
    if (before + size > at) at = aligned(before + size);
  }
  while (next != reserved_.end() && next->first < at + bytes) {
    at = aligned(next->first + next->second);
    ++next;
  }
  return at + bytes <= start_ + bytes_ ? at : 0;
}

uint64_t DeviceAddresses::reserve(uint64_t bytes, uint64_t alignment) {
  if (bytes > bytes_ || alignment > bytes_) return 0;
  uint64_t found = find_room(next_, bytes, alignment);
  if (found == 0) found = find_room(start_, bytes, alignment);
  if (found == 0) return 0;
  reserved_.emplace(found, bytes);
  next_ = found + bytes;
  return found;
}

void DeviceAddresses::free(uint64_t address) { reserved_.erase(address); }

bool DeviceAddresses::is_reserved(uint64_t address, uint64_t bytes) const {
  const auto after = reserved_.upper_bound(address);
  if (after == reserved_.begin()) return false;
  const auto& [start, size] = *std::prev(after);
  return address - start < size && bytes <= size - (address - start);
}

uint64_t DeviceAddresses::reserved_bytes(uint64_t address) const {
  const auto found = reserved_.find(address);
  return found == reserved_.end() ? 0 : found->second;
}

bool DeviceAddresses::show(uint64_t address, uint64_t bytes, int fd, uint64_t offset) {
  const int access = fd < 0 ? PROT_READ | PROT_WRITE : PROT_NONE;
  const int kind = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* made = mmap(view(address), bytes, access, kind | MAP_FIXED, fd, static_cast<off_t>(offset));
  return made != MAP_FAILED && keep_from_children(made, bytes);
}

bool DeviceAddresses::protect(uint64_t address, uint64_t bytes, bool writable) {
  return mprotect(view(address), bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ) == 0;
}

bool DeviceAddresses::hide(uint64_t address, uint64_t bytes) {
  return mmap(view(address), bytes, PROT_NONE, kNothing | MAP_FIXED, -1, 0) != MAP_FAILED;
}

}  // namespace test_libcuda
