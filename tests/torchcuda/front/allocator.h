// torch's caching allocator for CUDA, with its sizes: it keeps every segment until empty_cache().
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

namespace torchcuda {

using PoolId = std::pair<unsigned long long, unsigned long long>;

struct Counter {
  int64_t current = 0;
  int64_t peak = 0;
  int64_t allocated = 0;
  int64_t freed = 0;
  void add(int64_t amount);
  void reset_peak() { peak = current; }
};

struct Usage {
  Counter allocation, segment, active, inactive_split;
  Counter allocated_bytes, reserved_bytes, active_bytes, inactive_split_bytes, requested_bytes;
  int64_t ooms = 0;
  int64_t retries = 0;
  int64_t device_allocs = 0;
  int64_t device_frees = 0;
};

// Returns memory for a tensor on the device's current stream. Raises torch.OutOfMemoryError.
uint64_t allocate(int device, size_t bytes);
void release(uint64_t address);
// The block is not reused before the stream has done the work submitted before its release.
void record_use(uint64_t address, uint64_t stream);
// Returns whether the address is in one of the allocator's segments.
bool is_allocated(uint64_t address);

void empty_cache();
void set_memory_fraction(int device, double fraction);
double memory_fraction(int device);
Usage usage(int device);
void reset_peaks(int device);

void begin_pool(int device, PoolId pool);
void end_pool(int device, PoolId pool);
void release_pool(int device, PoolId pool);

std::pair<size_t, size_t> memory_info(int device);

}  // namespace torchcuda
