// Mapping and unmapping of runs of pages without bookkeeping, for kv_map.py.
#include <sys/mman.h>

#include <cstdint>

namespace {

constexpr int kHole = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

bool put(uint64_t address, uint64_t bytes, int protection, int flags, int fd, uint64_t offset) {
  return mmap(reinterpret_cast<void*>(address), bytes, protection, flags | MAP_FIXED, fd,
              static_cast<off_t>(offset)) != MAP_FAILED;
}

}  // namespace

// Reserves addresses without memory.
extern "C" uint64_t reserve(uint64_t bytes) {
  void* start = mmap(nullptr, bytes, PROT_NONE, kHole, -1, 0);
  return start == MAP_FAILED ? 0 : reinterpret_cast<uint64_t>(start);
}

// Maps `runs` runs of adjacent memory of the file at `stride` bytes from each other, then replaces
// them by holes. Returns 0 if a call failed.
extern "C" int round_trip(int fd, uint64_t start, uint64_t stride, uint64_t run_bytes, int runs) {
  for (int n = 0; n < runs; ++n) {
    if (!put(start + n * stride, run_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
             n * run_bytes)) {
      return 0;
    }
  }
  for (int n = 0; n < runs; ++n) {
    if (!put(start + n * stride, run_bytes, PROT_NONE, kHole, -1, 0)) return 0;
  }
  return 1;
}
