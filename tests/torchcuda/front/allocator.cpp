#include "allocator.h"

#include <c10/util/Exception.h>

#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "driver.h"
#include "graphs.h"

namespace torchcuda {

namespace {

constexpr size_t kMinBlock = 512;
constexpr size_t kSmall = 1 << 20;
constexpr size_t kSmallSegment = 2 << 20;
constexpr size_t kLargeSegment = 20 << 20;
constexpr size_t kMinLarge = 10 << 20;
constexpr size_t kRoundLarge = 2 << 20;

struct Block {
  uint64_t address;
  size_t bytes;
  size_t requested;
  int device;
  uint64_t stream;
  PoolId pool;
  bool small;
  bool allocated = false;
  Block* before = nullptr;
  Block* after = nullptr;
  std::set<uint64_t> users;
  std::vector<void*> events;

  bool is_split() const { return before != nullptr || after != nullptr; }
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    if (a->stream != b->stream) return a->stream < b->stream;
    if (a->bytes != b->bytes) return a->bytes < b->bytes;
    return a->address < b->address;
  }
};

using Free = std::set<Block*, BySize>;

struct Pool {
  Free small, large;
  int uses = 0;  // captures and graphs that hold it
  Free& of(const Block& block) { return block.small ? small : large; }
};

struct OfDevice {
  std::map<PoolId, Pool> pools;
  std::vector<PoolId> capturing;  // pools that allocations of captured streams come from
  std::vector<Block*> waiting;    // released, but still used by another stream
  Usage usage;
  double fraction = 1.0;
};

struct State {
  std::recursive_mutex mutex;
  std::map<int, OfDevice> devices;
  std::map<uint64_t, Block*> given;
  std::map<uint64_t, size_t> segments;
};

State& state() {
  static auto* instance = new State;
  return *instance;
}

size_t rounded(size_t bytes) {
  return bytes < kMinBlock ? kMinBlock : (bytes + kMinBlock - 1) / kMinBlock * kMinBlock;
}

size_t segment_bytes(size_t bytes) {
  if (bytes <= kSmall) return kSmallSegment;
  if (bytes < kMinLarge) return kLargeSegment;
  return (bytes + kRoundLarge - 1) / kRoundLarge * kRoundLarge;
}

bool is_worth_splitting(const Block& block, size_t bytes) {
  const size_t rest = block.bytes - bytes;
  return block.small ? rest >= kMinBlock : rest > kSmall;
}

size_t total_bytes(int device) { return memory_info(device).second; }

void count_idle(OfDevice& of, const Block& block, int sign) {
  if (!block.is_split()) return;
  of.usage.inactive_split.add(sign);
  of.usage.inactive_split_bytes.add(sign * static_cast<int64_t>(block.bytes));
}

void keep(OfDevice& of, Block* block) {
  of.pools[block->pool].of(*block).insert(block);
  count_idle(of, *block, 1);
}

void take(OfDevice& of, Block* block) {
  count_idle(of, *block, -1);
  of.pools[block->pool].of(*block).erase(block);
}

Block* find_free(OfDevice& of, const Block& wanted) {
  Free& free = of.pools[wanted.pool].of(wanted);
  Block key = wanted;
  key.address = 0;
  const auto found = free.lower_bound(&key);
  if (found == free.end() || (*found)->stream != wanted.stream) return nullptr;
  Block* block = *found;
  take(of, block);
  return block;
}

// Returns the driver's result; 2 (out of memory) if the cap prevents the call.
int make_segment(OfDevice& of, const Block& wanted, Block** made) {
  const size_t bytes = segment_bytes(wanted.bytes);
  const auto cap =
      static_cast<int64_t>(of.fraction * static_cast<double>(total_bytes(wanted.device)));
  if (of.fraction < 1.0 && of.usage.reserved_bytes.current + static_cast<int64_t>(bytes) > cap) {
    return 2;
  }
  const OnDevice context(wanted.device);
  const Relaxed relaxed;
  uint64_t address = 0;
  const int result = driver().cuMemAlloc_v2(&address, bytes);
  if (result != 0) return result;
  state().segments[address] = bytes;
  *made = new Block(wanted);
  (*made)->address = address;
  (*made)->bytes = bytes;
  of.usage.segment.add(1);
  of.usage.reserved_bytes.add(static_cast<int64_t>(bytes));
  ++of.usage.device_allocs;
  return 0;
}

void split(OfDevice& of, Block* block, size_t bytes) {
  if (!is_worth_splitting(*block, bytes)) return;
  auto* rest = new Block(*block);
  rest->address += bytes;
  rest->bytes -= bytes;
  rest->before = block;
  if (rest->after != nullptr) rest->after->before = rest;
  block->after = rest;
  block->bytes = bytes;
  keep(of, rest);
}

void merge_with_after(OfDevice& of, Block* block) {
  Block* after = block->after;
  if (after == nullptr || after->allocated || !after->events.empty()) return;
  take(of, after);
  block->bytes += after->bytes;
  block->after = after->after;
  if (block->after != nullptr) block->after->before = block;
  delete after;
}

void put_back(OfDevice& of, Block* block) {
  of.usage.active.add(-1);
  of.usage.active_bytes.add(-static_cast<int64_t>(block->bytes));
  merge_with_after(of, block);
  Block* before = block->before;
  if (before != nullptr && !before->allocated && before->events.empty()) {
    take(of, before);
    merge_with_after(of, before);
    keep(of, before);
    return;
  }
  keep(of, block);
}

void free_waiting(OfDevice& of, bool wait) {
  std::vector<Block*> still;
  for (Block* block : std::exchange(of.waiting, {})) {
    const OnDevice context(block->device);
    std::erase_if(block->events, [=](void* event) {
      if (wait) (void)driver().cuEventSynchronize(event);
      if (driver().cuEventQuery(event) != 0) return false;
      return driver().cuEventDestroy_v2(event) == 0;
    });
    if (block->events.empty()) {
      put_back(of, block);
    } else {
      still.push_back(block);
    }
  }
  of.waiting = still;
}

void free_segments(OfDevice& of, Free& free) {
  for (auto it = free.begin(); it != free.end();) {
    Block* block = *it;
    if (block->is_split()) {
      ++it;
      continue;
    }
    it = free.erase(it);
    const OnDevice context(block->device);
    // cudaFree waits for the device.
    synchronize_device(block->device);
    check(driver().cuMemFree_v2(block->address), "cudaFree");
    state().segments.erase(block->address);
    of.usage.segment.add(-1);
    of.usage.reserved_bytes.add(-static_cast<int64_t>(block->bytes));
    ++of.usage.device_frees;
    delete block;
  }
}

// Frees memory of the general pool, and of the pools of destroyed graphs.
void release_cached(OfDevice& of) {
  free_waiting(of, true);
  for (auto it = of.pools.begin(); it != of.pools.end();) {
    auto& [id, pool] = *it;
    if (id == PoolId{} || pool.uses == 0) {
      free_segments(of, pool.small);
      free_segments(of, pool.large);
    }
    const bool gone = id != PoolId{} && pool.uses == 0 && pool.small.empty() && pool.large.empty();
    it = gone ? of.pools.erase(it) : std::next(it);
  }
}

[[noreturn]] void out_of_memory(OfDevice& of, int device, size_t bytes) {
  ++of.usage.ooms;
  const auto [free, total] = memory_info(device);
  std::string allowed;
  if (of.fraction < 1.0) {
    const auto cap = static_cast<size_t>(of.fraction * static_cast<double>(total));
    allowed = in_words(cap) + " allowed; ";
  }
  TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ",
                   in_words(bytes), ". GPU ", device, " has a total capacity of ", in_words(total),
                   " of which ", in_words(free), " is free. ", allowed, "Of the allocated memory ",
                   in_words(of.usage.allocated_bytes.current), " is allocated by PyTorch, and ",
                   in_words(of.usage.reserved_bytes.current - of.usage.allocated_bytes.current),
                   " is reserved by PyTorch but unallocated.");
}

PoolId pool_for(OfDevice& of, int device) {
  if (of.capturing.empty() || capturing(device) == nullptr) return {};
  return of.capturing.back();
}

Block* find_or_make(OfDevice& of, const Block& wanted) {
  if (Block* block = find_free(of, wanted)) return block;
  Block* made = nullptr;
  if (make_segment(of, wanted, &made) == 0) return made;
  if (capturing(wanted.device) == nullptr) {
    ++of.usage.retries;
    release_cached(of);
    if (make_segment(of, wanted, &made) == 0) return made;
  }
  out_of_memory(of, wanted.device, wanted.requested);
}

}  // namespace

void Counter::add(int64_t amount) {
  current += amount;
  peak = std::max(peak, current);
  (amount > 0 ? allocated : freed) += amount > 0 ? amount : -amount;
}

std::pair<size_t, size_t> memory_info(int device) {
  const OnDevice context(device);
  size_t free = 0;
  size_t total = 0;
  check(driver().cuMemGetInfo_v2(&free, &total), "cudaMemGetInfo");
  return {free, total};
}

uint64_t allocate(int device, size_t requested) {
  check_not_forked();
  if (requested == 0) return 0;
  const std::lock_guard lock(state().mutex);
  OfDevice& of = state().devices[device];
  if (!of.waiting.empty() && capturing(device) == nullptr) free_waiting(of, false);
  Block wanted{};
  wanted.bytes = rounded(requested);
  wanted.requested = requested;
  wanted.device = device;
  wanted.stream = current_stream(device);
  wanted.pool = pool_for(of, device);
  wanted.small = wanted.bytes <= kSmall;
  Block* block = find_or_make(of, wanted);
  split(of, block, wanted.bytes);
  block->allocated = true;
  block->requested = requested;
  state().given[block->address] = block;
  const auto bytes = static_cast<int64_t>(block->bytes);
  of.usage.allocation.add(1);
  of.usage.active.add(1);
  of.usage.allocated_bytes.add(bytes);
  of.usage.active_bytes.add(bytes);
  of.usage.requested_bytes.add(static_cast<int64_t>(requested));
  return block->address;
}

void release(uint64_t address) {
  if (is_in_bad_fork()) return;
  const std::lock_guard lock(state().mutex);
  const auto found = state().given.find(address);
  if (found == state().given.end()) return;
  Block* block = found->second;
  state().given.erase(found);
  OfDevice& of = state().devices[block->device];
  block->allocated = false;
  of.usage.allocation.add(-1);
  of.usage.allocated_bytes.add(-static_cast<int64_t>(block->bytes));
  of.usage.requested_bytes.add(-static_cast<int64_t>(block->requested));
  const OnDevice context(block->device);
  for (const uint64_t stream : std::exchange(block->users, {})) {
    void* event = nullptr;
    check(driver().cuEventCreate(&event, 2), "cudaEventCreate");
    check(driver().cuEventRecord(event, reinterpret_cast<void*>(stream)), "cudaEventRecord");
    block->events.push_back(event);
  }
  if (block->events.empty()) {
    put_back(of, block);
  } else {
    of.waiting.push_back(block);
  }
}

void record_use(uint64_t address, uint64_t stream) {
  const std::lock_guard lock(state().mutex);
  const auto found = state().given.find(address);
  if (found == state().given.end() || found->second->stream == stream) return;
  found->second->users.insert(stream);
}

bool is_allocated(uint64_t address) {
  const std::lock_guard lock(state().mutex);
  const auto after = state().segments.upper_bound(address);
  if (after == state().segments.begin()) return false;
  const auto& [start, bytes] = *std::prev(after);
  return address - start < bytes;
}

void empty_cache() {
  check_not_forked();
  const std::lock_guard lock(state().mutex);
  for (auto& [device, of] : state().devices) release_cached(of);
}

void set_memory_fraction(int device, double fraction) {
  const std::lock_guard lock(state().mutex);
  state().devices[device].fraction = fraction;
}

double memory_fraction(int device) {
  const std::lock_guard lock(state().mutex);
  return state().devices[device].fraction;
}

Usage usage(int device) {
  const std::lock_guard lock(state().mutex);
  return state().devices[device].usage;
}

void reset_peaks(int device) {
  const std::lock_guard lock(state().mutex);
  Usage& of = state().devices[device].usage;
  for (Counter* counter :
       {&of.allocation, &of.segment, &of.active, &of.inactive_split, &of.allocated_bytes,
        &of.reserved_bytes, &of.active_bytes, &of.inactive_split_bytes, &of.requested_bytes}) {
    counter->reset_peak();
  }
}

void begin_pool(int device, PoolId pool) {
  const std::lock_guard lock(state().mutex);
  OfDevice& of = state().devices[device];
  ++of.pools[pool].uses;
  of.capturing.push_back(pool);
}

void end_pool(int device, PoolId pool) {
  const std::lock_guard lock(state().mutex);
  std::erase(state().devices[device].capturing, pool);
}

void release_pool(int device, PoolId pool) {
  const std::lock_guard lock(state().mutex);
  --state().devices[device].pools[pool].uses;
}

}  // namespace torchcuda
